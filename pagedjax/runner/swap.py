"""Pages to the host and back: a gather out of the stacked cache, and a row's pages filled in place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from pagedjax_kernels import KVCache

from pagedjax.pages import NULL_PAGE, Pages
from pagedjax.pages.queue import take, upcoming
from pagedjax.runner.state import EngineState
from pagedjax.runner.step import give_back

SWAP_WIDTH = 16
"""Pages moved in one dispatch."""
LOOKAHEAD = 64
"""Pages of each layer group about to be recycled that are reported at once."""

Blocks = Any  # a KVCache whose leaves begin with the pages: [W, L, ...]; jax arrays inside programs, numpy outside


def swap_out(state: EngineState, row: jax.Array, groups: jax.Array, index: jax.Array) -> tuple[KVCache, jax.Array]:
    """Copies of pages, for the host to read. Nothing is donated, and nothing needs to be pinned: the copy is the value of
    this moment, whatever becomes of the pages.

    Args:
      row: i32, the row whose logical pages `index` names; R: `index` names physical pages.
      groups: i32[W] the layer group of each logical page.
      index: i32[W]; padded with 0. A logical page that the row does not have (any more) gives NULL_PAGE.

    Returns:
      KVCache whose leaves are [W, L, ...], and the pages' generations u32[W] at this moment, 0 of NULL_PAGE.
    """
    table = state.pages.table
    logical = table.at[groups, row, index].get(mode="fill", fill_value=NULL_PAGE)
    page = jnp.where(row < table.shape[1], logical, index)
    copies = jax.tree.map(lambda leaf: jnp.moveaxis(leaf[:, page], 1, 0), state.cache)
    return copies, state.pages.generation[page]


def swap_in(
    state: EngineState,
    row: jax.Array,
    groups: jax.Array,
    index: jax.Array,
    blocks: Blocks,
    count: jax.Array,
    num_computed: jax.Array,
    *,
    windows: tuple[int, ...] = (0,),
) -> tuple[EngineState, tuple[jax.Array, jax.Array]]:
    """Fill `count` logical pages of a row with the first of `blocks`; those that the row lacks are taken, in their groups
    only. What a row at num_computed tokens does not see is given back. In place: no page but those is touched.

    Args:
      row: i32.
      groups, index: i32[W] distinct (group, logical page), the smaller logical pages first. What the row has of them must
        be its own alone.
      blocks: as `swap_out` returned them, leaves [W, L, ...].
      count: i32, 0 to W.
      num_computed: i32 tokens of the row that have their keys and values when all is filled.
      windows: static, of each layer group.

    Returns:
      state (donated), (ok bool: False where the pages were not there, and nothing has changed; num_unowned i32).
    """
    R = state.pages.max_rows
    lacking = (jnp.arange(index.shape[0], dtype=jnp.int32) < count) & (
        state.pages.table.at[groups, row, index].get(mode="fill", fill_value=NULL_PAGE) == NULL_PAGE
    )
    ok = jnp.sum(lacking, dtype=jnp.int32) <= state.pages.num_unowned
    row, count = jnp.where(ok, row, R), jnp.where(ok, count, 0)
    # First, as `slide` looks just before the window: a new gap there would hide what lies before the gap.
    pages = give_back(state.pages, row[None], num_computed[None], windows)
    pages, page = _grow(pages, row, groups, index, count, lacking & ok)

    def put(i: jax.Array, cache: KVCache) -> KVCache:
        def one(leaf: jax.Array, block: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice(leaf, block[i][:, None], (0, page[i], *(0,) * (leaf.ndim - 2)))

        return jax.tree.map(one, cache, blocks)

    # By slices in a loop, as in `copy_pages`: a scatter of bfloat16 may convert the whole pool.
    cache = lax.fori_loop(0, count, put, state.cache)
    filled = state.rows.num_computed.at[row].set(num_computed, mode="drop")
    state = state.replace(pages=pages, cache=cache, rows=state.rows.replace(num_computed=filled))
    return state, (ok, pages.num_unowned)


def _grow(
    pages: Pages, row: jax.Array, groups: jax.Array, index: jax.Array, count: jax.Array, lacking: jax.Array
) -> tuple[Pages, jax.Array]:
    """Take a page for each of the `lacking` bool[W] logical pages; returns the physical ones i32[W] of all.

    Not `alloc`, which would take a page in every group: most groups of a long row need few.
    """
    W, R = index.shape[0], pages.max_rows
    lane = jnp.arange(W, dtype=jnp.int32)
    pages, taken = take(pages, jnp.sum(lacking, dtype=jnp.int32), W)
    ordinal = jnp.maximum(jnp.cumsum(lacking, dtype=jnp.int32) - 1, 0)
    target = jnp.where(lacking, row, R + lane)
    table = pages.table.at[groups, target, index].set(taken[ordinal], mode="drop", unique_indices=True)
    end = jnp.max(jnp.where(lane < count, index + 1, 0))
    pages = pages.replace(table=table, num_pages=pages.num_pages.at[row].max(end, mode="drop"))
    return pages, pages.table.at[groups, row, index].get(mode="fill", fill_value=NULL_PAGE)


def look_ahead(state: EngineState) -> tuple[jax.Array, jax.Array]:
    """(ids i32[G * LOOKAHEAD], generations u32[G * LOOKAHEAD]) of cached pages that are recycled next; padded with N."""
    return upcoming(state.pages, LOOKAHEAD * state.pages.num_groups)
