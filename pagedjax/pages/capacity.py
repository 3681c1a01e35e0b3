"""How many bytes, pages, tokens and requests: exact integer arithmetic. Nothing here knows about JAX.

Formulas and reference values: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (SOSP 2023), section 3 and table 1. The paper gives device and weight sizes in decimal gigabytes, cache
sizes in GiB.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from fractions import Fraction

GIB = 2**30


def _check(name: str, value: int, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}: must be an integer, got {value!r}")
    if value < low:
        raise ValueError(f"{name}: must be at least {low}, got {value}")


def bytes_per_token(
    num_layers: int, num_kv_heads: int, head_dim: int, bytes_per_element: int, bytes_per_scale: int = 0
) -> int:
    """Bytes that keys and values of one token take in all layers: 2 x layers x KV heads x head dim x bytes per element.

    Args:
      bytes_per_scale: of the scale that a quantised cache keeps per token and head, for K and for V; 0 without.
    """
    for name, value in (
        ("num_layers", num_layers),
        ("num_kv_heads", num_kv_heads),
        ("head_dim", head_dim),
        ("bytes_per_element", bytes_per_element),
    ):
        _check(name, value, 1)
    _check("bytes_per_scale", bytes_per_scale, 0)
    return 2 * num_layers * num_kv_heads * (head_dim * bytes_per_element + bytes_per_scale)


def bytes_per_page(
    num_layers: int, num_kv_heads: int, head_dim: int, bytes_per_element: int, page_size: int, bytes_per_scale: int = 0
) -> int:
    """Bytes of one page of `page_size` tokens, in all layers."""
    _check("page_size", page_size, 1)
    return page_size * bytes_per_token(num_layers, num_kv_heads, head_dim, bytes_per_element, bytes_per_scale)


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that a sequence of `num_tokens` takes."""
    _check("num_tokens", num_tokens, 0)
    _check("page_size", page_size, 1)
    return -(-num_tokens // page_size)


def flat_offset(page: int, offset: int, page_size: int, num_kv_heads: int, head_dim: int) -> int:
    """Elements before a slot in one layer's keys [page, slot, head, dim]. Passes 2**31 in pools of a common size."""
    return (page * page_size + offset) * num_kv_heads * head_dim


def cache_memory(
    memory_bytes: int, weight_bytes: int = 0, activation_bytes: int = 0, fraction: float | Fraction = 1
) -> int:
    """Bytes left for pages in a device's memory of which `fraction` may be used; 0 where the rest takes all of it.

    Raises:
      ValueError: a negative size, a fraction outside (0, 1].
    """
    for name, value in (
        ("memory_bytes", memory_bytes),
        ("weight_bytes", weight_bytes),
        ("activation_bytes", activation_bytes),
    ):
        _check(name, value, 0)
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction: must be in (0, 1], got {fraction}")
    # As decimals read: 0.9 means nine tenths, not the binary number nearest to it.
    usable = memory_bytes * Fraction(str(fraction))
    return max(0, usable.numerator // usable.denominator - weight_bytes - activation_bytes)


def activation_bytes(
    *, num_tokens: int, num_rows: int, hidden_size: int, intermediate_size: int, vocab_size: int
) -> int:
    """Bytes of one step's activations, estimated from above: the widest are the MLP's and, per sampling row, the logits.

    Everything is counted in float32, with a factor for copies.

    Args:
      num_tokens: most tokens in one step.
      num_rows: most rows that sample in it.
    """
    return 4 * num_tokens * (3 * intermediate_size + 8 * hidden_size) + 3 * 4 * num_rows * vocab_size


def pages_that_fit(cache_bytes: int, page_bytes: int) -> int:
    """Pages of `page_bytes` in `cache_bytes`, the reserved page included: one less can be used."""
    _check("cache_bytes", cache_bytes, 0)
    _check("page_bytes", page_bytes, 1)
    return cache_bytes // page_bytes


def max_concurrent_requests(
    usable_pages: int, tokens_per_request: int, page_size: int, shared_prefix_tokens: int = 0
) -> int:
    """Requests of one shape that fit at once, if all begin with the same `shared_prefix_tokens`, held once.

    Only whole pages of the prefix can be shared, and never the last token of a request.

    Args:
      usable_pages: without the reserved one.
      tokens_per_request: prompt and output together, the prefix included; at least 1.
    """
    _check("usable_pages", usable_pages, 0)
    _check("tokens_per_request", tokens_per_request, 1)
    _check("shared_prefix_tokens", shared_prefix_tokens, 0)
    if shared_prefix_tokens > tokens_per_request:
        raise ValueError(
            f"shared_prefix_tokens: must be at most tokens_per_request = {tokens_per_request}, "
            f"got {shared_prefix_tokens}"
        )
    shared = min(shared_prefix_tokens, tokens_per_request - 1) // page_size
    own = pages_for(tokens_per_request, page_size) - shared
    return max(0, usable_pages - shared) // own


@dataclasses.dataclass(frozen=True)
class Allocation:
    """When sequences get pages: as they fill them, or as older systems do. Those share nothing and know no windows.

    Attributes:
      chunk_pages: a sequence grows by so many adjoining pages at a time.
      reserve: not empty: all pages are taken at admission, in one piece. How many: `max_len`, for the longest sequence;
        `pow2`, for the prompt and the possible output rounded up to a power of two; `request`, for exactly these. They are
        Orca (Max), (Pow2) and, where no sequence ends early, (Oracle) of Kwon et al. 2023, section 6.1.
    """

    chunk_pages: int = 1
    reserve: str = ""

    @property
    def is_paged(self) -> bool:
        return self == PAGED

    def reserved(self, prompt_len: int, max_total: int, max_len: int) -> int:
        """Tokens to reserve for a sequence of up to `max_total` tokens, the prompt included; 0 where it takes pages later.

        Args:
          max_len: longest sequence that a row holds; nothing more is reserved.
        """
        if not self.reserve:
            return 0
        power = 1 << max(max_total - prompt_len - 1, 0).bit_length()
        return {"max_len": max_len, "pow2": min(prompt_len + power, max_len), "request": max_total}[self.reserve]


PAGED = Allocation()
"""Pages on demand, one at a time."""


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Physical pages that sequences hold, where layers are in groups with a table each and some groups see a window.

    Attributes:
      page_size: tokens in a page.
      windows: one entry a group, the tokens that a query sees, itself included; 0: all.
      allocation: when pages are taken.
    """

    page_size: int
    windows: tuple[int, ...] = (0,)
    allocation: Allocation = PAGED

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    def logical(self, num_tokens: int) -> int:
        """Pages of a table that num_tokens fill, in whole chunks; a step that crosses into a new one takes it in every
        group."""
        chunk = self.allocation.chunk_pages
        return -(-num_tokens // (self.page_size * chunk)) * chunk

    def taken(self, num_computed: int, num_tokens: int) -> int:
        """Pages that a step takes for a row which it carries from num_computed to num_tokens tokens."""
        if self.allocation.reserve:
            return 0
        return (self.logical(num_tokens) - self.logical(num_computed)) * self.num_groups

    def first(self, num_tokens: int) -> tuple[int, ...]:
        """By group, the first page of a table that a row with num_tokens computed still needs; see `first_needed`."""
        return tuple(max(num_tokens - window + 1, 0) // self.page_size if window else 0 for window in self.windows)

    def held(self, num_tokens: int) -> tuple[int, ...]:
        """Pages by group of a row with num_tokens computed, once those behind the next token's window are given back."""
        return tuple(max(self.logical(num_tokens) - n, 0) for n in self.first(num_tokens))

    def most(self, num_tokens: int, chunk: int) -> tuple[int, ...]:
        """Most pages by group that a row holds at once on its way to num_tokens, if no step adds more than `chunk`.

        The step's tokens and what the first of them sees, lying anywhere in their pages.
        """
        logical = self.logical(num_tokens)
        seen = ((window - 1 + chunk + self.page_size - 2) // self.page_size + 1 for window in self.windows)
        return tuple(min(logical, n) if window else logical for window, n in zip(self.windows, seen, strict=True))

    def growth(self, num_computed: int, num_tokens: int, chunk: int) -> int:
        """Pages that a row with num_computed tokens takes yet, net, on its way to num_tokens in steps of `chunk`."""
        if self.allocation.reserve:
            return 0
        now, then = self.held(num_computed), self.most(num_tokens, chunk)
        return sum(max(t - n, 0) for n, t in zip(now, then, strict=True))

    def longest(self, usable_pages: int, chunk: int, at_most: int) -> int:
        """Tokens, up to `at_most`, of the longest sequence that `usable_pages` can hold alone."""
        low, high = 0, self.logical(at_most)
        while low < high:
            middle = (low + high + 1) // 2
            if sum(self.most(middle * self.page_size, chunk)) <= usable_pages:
                low = middle
            else:
                high = middle - 1
        return min(low * self.page_size, at_most)


@dataclasses.dataclass(frozen=True)
class Capacity:
    """One line of the answer to "how many concurrent requests of this shape fit on this card?"."""

    tokens_per_request: int
    pages_per_request: int
    concurrent_requests: int
    usable_pages: int
    usable_tokens: int


def capacity_table(
    usable_pages: int, page_size: int, tokens_per_request: Iterable[int], shared_prefix_tokens: int = 0
) -> list[Capacity]:
    """Concurrent requests for each request length; a length shorter than the shared prefix shares what it has."""
    return [
        Capacity(
            tokens_per_request=tokens,
            pages_per_request=pages_for(tokens, page_size),
            concurrent_requests=max_concurrent_requests(
                usable_pages, tokens, page_size, min(shared_prefix_tokens, tokens)
            ),
            usable_pages=usable_pages,
            usable_tokens=usable_pages * page_size,
        )
        for tokens in tokens_per_request
    ]
