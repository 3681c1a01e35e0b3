"""Pages to the host and back: a gather out of the stacked cache, and a row's pages filled in place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from pagedjax_kernels import KVCache

from pagedjax.pages import NULL_PAGE, alloc
from pagedjax.pages.queue import upcoming
from pagedjax.runner.state import EngineState

SWAP_WIDTH = 16
"""Pages moved in one dispatch."""
LOOKAHEAD = 64
"""Pages about to be recycled that are reported at once."""

Blocks = Any  # a KVCache whose leaves begin with the pages: [W, L, ...]; jax arrays inside programs, numpy outside


def swap_out(state: EngineState, row: jax.Array, index: jax.Array) -> tuple[KVCache, jax.Array]:
    """Copies of pages, for the host to read. Nothing is donated, and nothing needs to be pinned: the copy is the value of
    this moment, whatever becomes of the pages.

    Args:
      row: i32, the row whose logical pages `index` names; R: `index` names physical pages.
      index: i32[W]; padded with 0. A logical page that the row does not have gives NULL_PAGE.

    Returns:
      KVCache whose leaves are [W, L, ...], and the pages' generations u32[W] at this moment.
    """
    table = state.pages.table
    logical = table.at[0, row, index].get(mode="fill", fill_value=NULL_PAGE)
    page = jnp.where(row < table.shape[1], logical, index)
    copies = jax.tree.map(lambda leaf: jnp.moveaxis(leaf[:, page], 1, 0), state.cache)
    return copies, state.pages.generation[page]


def swap_in(
    state: EngineState, row: jax.Array, start: jax.Array, blocks: Blocks, count: jax.Array, num_computed: jax.Array
) -> tuple[EngineState, tuple[jax.Array, jax.Array]]:
    """Fill `count` logical pages of a row, from `start` on, with the first of `blocks`; the pages that the row lacks are
    taken. In place: no page but those is touched.

    Args:
      row: i32.
      start: i32, at most the pages that the row has. Those from there on must be its own alone.
      blocks: as `swap_out` returned them, leaves [W, L, ...].
      count: i32, 0 to W.
      num_computed: i32 tokens of the row that have their keys and values then.

    Returns:
      state (donated), (ok bool: False where the pages were not there, and nothing has changed; num_unowned i32).
    """
    R, W = state.pages.max_rows, blocks.kv_pages.shape[0]
    have = state.pages.num_pages.at[row].get(mode="fill", fill_value=0)
    pages, served = alloc(state.pages, row[None], jnp.maximum(start + count - have, 0)[None], max_total=W)
    ok = served[0]
    page = pages.table.at[0, row, start + jnp.arange(W, dtype=jnp.int32)].get(mode="fill", fill_value=NULL_PAGE)

    def put(i: jax.Array, cache: KVCache) -> KVCache:
        def one(leaf: jax.Array, block: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice(leaf, block[i][:, None], (0, page[i], *(0,) * (leaf.ndim - 2)))

        return jax.tree.map(one, cache, blocks)

    # By slices in a loop, as in `copy_pages`: a scatter of bfloat16 may convert the whole pool.
    cache = lax.fori_loop(0, jnp.where(ok, count, 0), put, state.cache)
    filled = state.rows.num_computed.at[jnp.where(ok, row, R)].set(num_computed, mode="drop")
    state = state.replace(pages=pages, cache=cache, rows=state.rows.replace(num_computed=filled))
    return state, (ok, pages.num_unowned)


def look_ahead(state: EngineState) -> tuple[jax.Array, jax.Array]:
    """(ids i32[LOOKAHEAD], generations u32[LOOKAHEAD]) of cached pages that are recycled next; padded with N."""
    return upcoming(state.pages, LOOKAHEAD)
