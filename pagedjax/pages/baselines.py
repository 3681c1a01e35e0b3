"""What paging is compared with, as the same kind of functions: contiguous reservation and fixed-size chunks.

    state, result = verb(state, rows, ...)

Contiguous reservation is a buddy allocator over units of some tokens (16 in the paper). A request takes, once, a power of two
of adjoining units for all that it is expected to come to, and gives it back when it ends. How much that is, is the
difference between the three Orca variants of Kwon et al. 2023, section 6.1, see `reservation`. FasterTransformer and
Hugging Face Transformers reserve the maximum as well.

A pool of fixed-size chunks hands out chunks of some hundred tokens as a sequence grows. Nothing is shared.

All verbs work the same eagerly, under `jax.jit` and under `jax.vmap`. Rows are listed in arrival order and padded with R.
What could not be done is a value.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

RESERVATIONS = ("max", "pow2", "oracle")
"""What is known of an output before it is there: nothing, its length up to a power of two, its length."""


def reservation(kind: str, prompt: Any, output: Any, max_model_len: int) -> np.ndarray:
    """Tokens that a request has reserved for it: min(prompt + expected output, max_model_len), i32.

    Args:
      kind: one of RESERVATIONS. "pow2" expects the output rounded up to a power of two (25 -> 32), "oracle" the output,
        "max" whatever fits.
      prompt, output: i32[...] tokens.
    """
    prompt, output = np.asarray(prompt, np.int64), np.asarray(output, np.int64)
    if kind == "max":
        expected = np.full_like(output, max_model_len)
    elif kind == "pow2":
        expected = 2 ** np.ceil(np.log2(np.maximum(output, 1))).astype(np.int64)
    elif kind == "oracle":
        expected = output
    else:
        raise ValueError(f"kind: must be one of {', '.join(RESERVATIONS)}, got {kind!r}")
    return np.minimum(prompt + expected, max_model_len).astype(np.int32)


# Contiguous chunks of a power of two


class Buddy(struct.PyTreeNode):
    """A buddy allocator. U units, R rows; a chunk of order o is 2**o units and begins at a multiple of that.

    Chunks are nowhere listed by order: the smallest free chunk that is large enough, of those the first, is found by one
    look over U numbers.
    """

    free: jax.Array  # i32[U] 1 + order of the free chunk that begins here, 0 where none does
    start: jax.Array  # i32[R] first unit of the row's chunk
    order: jax.Array  # i32[R] 1 + its order, 0 for a row without one
    max_order: int = struct.field(pytree_node=False)  # of the largest chunks

    @property
    def num_units(self) -> int:
        """U."""
        return self.free.shape[-1]

    @property
    def max_rows(self) -> int:
        """R; also the index of a padded row."""
        return self.order.shape[-1]


def init_buddy(*, num_units: int, max_rows: int, max_order: int = 7) -> Buddy:
    """All units free, carved greedily into chunks of 2**max_order units, then into smaller and smaller ones.

    Args:
      num_units: U.
      max_rows: R.
      max_order: 7 is 128 units, 2,048 tokens in units of 16.

    Raises:
      ValueError: a size out of range.
    """
    for name, value, low, high in (
        ("num_units", num_units, 1, 2**24),
        ("max_rows", max_rows, 1, 2**24),
        ("max_order", max_order, 0, 20),
    ):
        if not low <= value <= high:
            raise ValueError(f"{name}: must be in [{low}, {high}], got {value}")
    if num_units * (max_order + 2) >= 2**31:
        raise ValueError(f"num_units x (max_order + 2): must be below 2**31, got {num_units * (max_order + 2)}")
    free, at = np.zeros(num_units, np.int32), 0
    while at < num_units:
        order = min(max_order, (num_units - at).bit_length() - 1)
        free[at] = order + 1
        at += 1 << order
    return Buddy(
        free=jnp.asarray(free),
        start=jnp.zeros(max_rows, jnp.int32),
        order=jnp.zeros(max_rows, jnp.int32),
        max_order=max_order,
    )


def order_of(units: jax.Array, max_order: int) -> jax.Array:
    """The smallest o with 2**o >= units, i32; above max_order where there is none up to it."""
    powers = 1 << jnp.arange(max_order + 1, dtype=jnp.int32)
    return jnp.sum(units[..., None] > powers, axis=-1, dtype=jnp.int32)


def reserve(buddy: Buddy, rows: jax.Array, units: jax.Array, *, together: int = 1) -> tuple[Buddy, jax.Array]:
    """Give each row a chunk of at least `units`, the smallest that is free, of those the first; split it where it is larger.

    The rows are served in the order given: the first group that cannot be served and all after it are left untouched. A
    row cannot be served if there is no chunk, if it has one, or where units is outside [1, 2**max_order].

    Args:
      buddy: donated.
      rows: i32[C], distinct; padded with R.
      units: i32[C]; ignored where the row is padded.
      together: static; so many lanes in a row are a group, served whole or not at all. C is a multiple of it.

    Returns:
      buddy, ok bool[C], padded rows included.
    """
    R, U, top = buddy.max_rows, buddy.num_units, buddy.max_order
    levels = jnp.arange(top, dtype=jnp.int32)
    index = jnp.arange(U, dtype=jnp.int32)

    def one(buddy: Buddy, lane: tuple[jax.Array, jax.Array]) -> tuple[Buddy, jax.Array]:
        row, wanted = lane
        order = order_of(wanted, top)
        key = jnp.where(buddy.free > order, buddy.free * U + index, jnp.iinfo(jnp.int32).max)
        at = jnp.argmin(key).astype(jnp.int32)
        found = buddy.free[at] - 1
        possible = (wanted >= 1) & (order <= top) & (buddy.order.at[row].get(mode="fill", fill_value=0) == 0)
        served = (row < R) & possible & (found >= order)
        # What is split off are the second halves, from the chunk's own down to those of the size taken.
        halves = served & (levels >= order) & (levels < found)
        free = buddy.free.at[jnp.where(served, at, U)].set(0, mode="drop")
        free = free.at[jnp.where(halves, at + (1 << levels), U + levels)].set(
            levels + 1, mode="drop", unique_indices=True
        )
        row = jnp.where(served, row, R)
        buddy = buddy.replace(
            free=free,
            start=buddy.start.at[row].set(at, mode="drop"),
            order=buddy.order.at[row].set(order + 1, mode="drop"),
        )
        return buddy, served

    def group(carry: tuple[Buddy, jax.Array], lanes: tuple[jax.Array, jax.Array]):
        before, failed = carry
        after, served = lax.scan(one, before, lanes)
        ok = ~failed & jnp.all(served | (lanes[0] >= R))
        return (jax.tree.map(functools.partial(jnp.where, ok), after, before), ~ok), jnp.broadcast_to(ok, served.shape)

    lanes = (rows.reshape(-1, together), units.reshape(-1, together))
    (buddy, _), ok = lax.scan(group, (buddy, jnp.zeros((), jnp.bool_)), lanes)
    return buddy, ok.reshape(-1)


def release_buddy(buddy: Buddy, rows: jax.Array) -> tuple[Buddy, jax.Array]:
    """Give back the rows' chunks; a free chunk and its free other half become one again, as far as that goes.

    Args:
      buddy: donated.
      rows: i32[C], distinct; padded with R. A row without a chunk gives nothing back.

    Returns:
      buddy, i32 units given back.
    """
    R, U = buddy.max_rows, buddy.num_units

    def one(buddy: Buddy, row: jax.Array) -> tuple[Buddy, jax.Array]:
        given = buddy.order.at[row].get(mode="fill", fill_value=0)
        at, order, free = buddy.start.at[row].get(mode="fill", fill_value=0), given - 1, buddy.free
        for level in range(buddy.max_order):
            # Chunks of the first carving have no other half: what is there is smaller.
            other = at ^ (1 << level)
            merges = (order == level) & (free.at[other].get(mode="fill", fill_value=0) == level + 1)
            free = free.at[jnp.where(merges, other, U)].set(0, mode="drop")
            at, order = jnp.where(merges, jnp.minimum(at, other), at), order + merges.astype(jnp.int32)
        free = free.at[jnp.where(given > 0, at, U)].set(order + 1, mode="drop")
        buddy = buddy.replace(free=free, order=buddy.order.at[row].set(0, mode="drop"))
        return buddy, jnp.where(given > 0, 1 << jnp.maximum(given - 1, 0), 0)

    buddy, units = lax.scan(one, buddy, jnp.minimum(rows, R))
    return buddy, jnp.sum(units, dtype=jnp.int32)


def free_units(buddy: Buddy) -> jax.Array:
    """i32 units in no row's chunk."""
    return jnp.sum(jnp.where(buddy.free > 0, 1 << jnp.maximum(buddy.free - 1, 0), 0), dtype=jnp.int32)


# Chunks of one size


class Chunks(struct.PyTreeNode):
    """A pool of chunks of one size. N chunks, R rows, P chunks a row. Free chunks are a stack."""

    table: jax.Array  # i32[R, P] chunk of each part of a row; columns from num_chunks on mean nothing
    num_chunks: jax.Array  # i32[R]
    stack: jax.Array  # i32[N] free chunks, the one on top is taken next
    num_free: jax.Array  # i32 height of the stack

    @property
    def max_rows(self) -> int:
        """R; also the index of a padded row."""
        return self.table.shape[-2]


def init_chunks(*, num_chunks: int, max_rows: int, max_chunks_per_row: int) -> Chunks:
    """All chunks free; they will be taken in the order 0, 1, 2, ...

    Raises:
      ValueError: a size out of range.
    """
    for name, value in (
        ("num_chunks", num_chunks),
        ("max_rows", max_rows),
        ("max_chunks_per_row", max_chunks_per_row),
    ):
        if not 1 <= value <= 2**24:
            raise ValueError(f"{name}: must be in [1, {2**24}], got {value}")
    return Chunks(
        table=jnp.zeros((max_rows, max_chunks_per_row), jnp.int32),
        num_chunks=jnp.zeros(max_rows, jnp.int32),
        stack=jnp.arange(num_chunks, dtype=jnp.int32)[::-1],
        num_free=jnp.array(num_chunks, jnp.int32),
    )


def alloc_chunks(chunks: Chunks, rows: jax.Array, need: jax.Array) -> tuple[Chunks, jax.Array]:
    """Append `need` chunks to each row, as `pagedjax.pages.alloc` does with pages: a strict prefix of the rows is served.

    Args:
      chunks: donated.
      rows: i32[C], distinct, in arrival order; padded with R.
      need: i32[C].

    Returns:
      chunks, ok bool[C].
    """
    (R, P), (N,) = chunks.table.shape, chunks.stack.shape
    real = rows < R
    have = chunks.num_chunks.at[rows].get(mode="fill", fill_value=0)
    possible = ~real | ((need >= 0) & (need <= P - have))
    wanted = jnp.where(real & possible, need, 0)
    ends = jnp.cumsum(wanted, dtype=jnp.int32)
    ok = jnp.cumsum(~(possible & (ends <= chunks.num_free)), dtype=jnp.int32) == 0
    grown = jnp.where(ok, wanted, 0)
    total = jnp.sum(grown, dtype=jnp.int32)
    ordinal = jnp.arange(min(N, rows.shape[0] * P), dtype=jnp.int32)
    lane = jnp.searchsorted(ends, ordinal, side="right", method="scan_unrolled").astype(jnp.int32)
    lane = jnp.minimum(lane, rows.shape[0] - 1)
    column = have[lane] + ordinal - (ends[lane] - wanted[lane])
    taken = chunks.stack[jnp.maximum(chunks.num_free - 1 - ordinal, 0)]
    row = jnp.where(ordinal < total, rows[lane], R + ordinal)
    return chunks.replace(
        table=chunks.table.at[row, column].set(taken, mode="drop", unique_indices=True),
        num_chunks=chunks.num_chunks.at[rows].add(grown, mode="drop"),
        num_free=chunks.num_free - total,
    ), ok


def release_chunks(chunks: Chunks, rows: jax.Array) -> tuple[Chunks, jax.Array]:
    """Give back all chunks of the rows.

    Args:
      chunks: donated.
      rows: i32[C], distinct; padded with R.

    Returns:
      chunks, i32 chunks given back.
    """
    (_, P), (N,) = chunks.table.shape, chunks.stack.shape
    count = chunks.num_chunks.at[rows].get(mode="fill", fill_value=0)
    ids = chunks.table.at[rows].get(mode="fill", fill_value=0).reshape(-1)
    held = (jnp.arange(P, dtype=jnp.int32)[None, :] < count[:, None]).reshape(-1)
    place = chunks.num_free + jnp.cumsum(held, dtype=jnp.int32) - 1
    place = jnp.where(held, place, N + jnp.arange(held.shape[0], dtype=jnp.int32))
    total = jnp.sum(count, dtype=jnp.int32)
    return chunks.replace(
        num_chunks=chunks.num_chunks.at[rows].set(0, mode="drop"),
        stack=chunks.stack.at[place].set(ids, mode="drop", unique_indices=True),
        num_free=chunks.num_free + total,
    ), total
