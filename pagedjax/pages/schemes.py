"""How many requests of one shape fit at once under each way to lay out their KV cache: closed forms, no allocator.

The contiguous schemes are the baselines of Kwon et al. (SOSP 2023, section 6.1): Orca with a buddy allocator that
reserves for the longest output (max), for the output rounded up to a power of two (pow2), or for the true output
(oracle). The rules of the buddy allocator are those of the authors' artifact: its unit is a block of 16 tokens, a
reservation is a power of two of them, the pool is carved into the largest chunks and the rest into smaller ones.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction

from pagedjax.pages.capacity import Footprint

UNIT = 16
"""Tokens in the buddy allocator's smallest block."""


def power_of_two_from(n: int) -> int:
    """The smallest power of two that is at least n (n >= 1)."""
    if n < 1:
        raise ValueError(f"n: must be at least 1, got {n}")
    return 1 << (n - 1).bit_length()


@dataclasses.dataclass(frozen=True)
class RequestShape:
    """Tokens of prompt and output; at least one of each."""

    prompt: int
    output: int

    def __post_init__(self) -> None:
        for name, value in (("prompt", self.prompt), ("output", self.output)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: must be an integer of at least 1, got {value!r}")

    @property
    def total(self) -> int:
        return self.prompt + self.output


def reserved_max(shape: RequestShape, max_len: int) -> int:
    """Tokens that a scheduler reserves which knows nothing of the output: the longest sequence."""
    _check_fits(shape, max_len)
    return max_len


def reserved_pow2(shape: RequestShape, max_len: int) -> int:
    """Tokens reserved where the output is known up to the next power of two: an output of 25 counts as 32."""
    _check_fits(shape, max_len)
    return min(shape.prompt + power_of_two_from(shape.output), max_len)


def reserved_oracle(shape: RequestShape, max_len: int) -> int:
    """Tokens reserved where the output's length is known."""
    _check_fits(shape, max_len)
    return shape.total


def buddy_requests(pool_tokens: int, reserved_tokens: int, unit: int = UNIT) -> int:
    """Equal reservations that a buddy allocator fits into a pool.

    A pool of n blocks is carved into the largest chunks and then into ever smaller powers of two. A chunk of 2^i blocks
    serves 2^(i - k) reservations of 2^k blocks and none where i < k, so all chunks together serve floor(n / 2^k).

    Args:
      pool_tokens: contiguous token slots; those past the last whole block are lost.
      reserved_tokens: of one request, rounded up to a power of two of blocks.
      unit: tokens in a block.
    """
    for name, value, low in (
        ("pool_tokens", pool_tokens, 0),
        ("reserved_tokens", reserved_tokens, 1),
        ("unit", unit, 1),
    ):
        if value < low:
            raise ValueError(f"{name}: must be at least {low}, got {value}")
    return (pool_tokens // unit) // power_of_two_from(-(-reserved_tokens // unit))


def chunk_requests(pool_tokens: int, total_tokens: int, chunk_tokens: int) -> int:
    """Requests that fit where memory is handed out in fixed-size chunks, as they fill: all at their full length."""
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens: must be at least 1, got {chunk_tokens}")
    if pool_tokens < 0 or total_tokens < 1:
        raise ValueError(f"pool_tokens, total_tokens: must be at least 0 and 1, got {pool_tokens}, {total_tokens}")
    return (pool_tokens // chunk_tokens) // -(-total_tokens // chunk_tokens)


def paged_requests(footprint: Footprint, usable_pages: int, shape: RequestShape, chunk: int) -> int:
    """Requests that fit in pages while all are at their full length.

    Args:
      footprint: page size, and the windows of the layer groups.
      usable_pages: without the reserved one.
      chunk: most prompt tokens computed in one step; with windows, they are held together with what the first sees.
    """
    return usable_pages // sum(footprint.most(shape.total, chunk))


def mean_pages(footprint: Footprint, shape: RequestShape) -> Fraction:
    """Pages that a request holds on average while it decodes: it has prompt + i tokens when output token i is made."""
    held = sum(sum(footprint.held(shape.prompt + i)) for i in range(shape.output))
    return Fraction(held, shape.output)


def paged_requests_on_average(footprint: Footprint, usable_pages: int, shape: RequestShape) -> int:
    """Requests that fit in pages where they are evenly spread over their outputs, as under steady load."""
    return int(usable_pages / mean_pages(footprint, shape))


def _check_fits(shape: RequestShape, max_len: int) -> None:
    if shape.total > max_len:
        raise ValueError(f"max_len: {max_len} tokens are less than prompt + output = {shape.prompt} + {shape.output}")
