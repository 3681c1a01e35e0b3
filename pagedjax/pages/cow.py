"""Copy-on-write: nobody writes into a page that somebody else holds too."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pagedjax.pages.queue import take
from pagedjax.pages.state import NULL_PAGE, Pages

_PAIRWISE = 256
"""Up to so many writers they are compared in pairs (one fused kernel); above, sorted."""


def _writers_of(page: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For pages i32[K] about to be written: i32[K] valid entries that name the same page, bool[K] the last of them."""
    K = page.shape[0]
    lane = jnp.arange(K, dtype=jnp.int32)
    if K <= _PAIRWISE:
        same = (page[:, None] == page[None, :]) & valid[None, :]
        later = lane[None, :] > lane[:, None]
        return jnp.sum(same, axis=1, dtype=jnp.int32), valid & ~jnp.any(same & later, axis=1)
    key = jnp.where(valid, page, jnp.iinfo(jnp.int32).max)
    order = jnp.argsort(key, stable=True)
    ranked = key[order]
    first = jnp.searchsorted(ranked, key, side="left").astype(jnp.int32)
    end = jnp.searchsorted(ranked, key, side="right").astype(jnp.int32)
    return end - first, valid & (order[end - 1] == lane)


def _shared_writes(pages: Pages, rows: jax.Array, logical: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(page i32[C, G] about to be written, NULL_PAGE if none; copy bool[C, G] whether the writer needs a copy)."""
    R, P = pages.max_rows, pages.max_pages_per_row
    inside = (rows < R) & (logical >= 0) & (logical < P)
    row, column = jnp.where(inside, rows, R), jnp.where(inside, logical, 0)
    page = pages.table.at[:, row, column].get(mode="fill", fill_value=NULL_PAGE).T
    flat = page.reshape(-1)
    valid = flat != NULL_PAGE
    count = pages.ref_counts[flat]
    writers, last = _writers_of(flat, valid)
    # Where all holders write at once the last of them may keep the page: by then all others have left it.
    keeps = (count == 1) | ((count == writers) & last)
    return page, (valid & ~keeps).reshape(page.shape)


def cow_need(pages: Pages, rows: jax.Array, logical: jax.Array) -> jax.Array:
    """i32[C] physical pages that `cow` with these arguments would take for each row. Changes nothing."""
    return jnp.sum(_shared_writes(pages, rows, logical)[1], axis=1, dtype=jnp.int32)


def cow(pages: Pages, rows: jax.Array, logical: jax.Array) -> tuple[Pages, jax.Array, jax.Array]:
    """Give each row a page of its own where it is about to write: a new one, to be copied into, for a shared one.

    One page a row: a row that writes across several pages has the later ones fresh from `alloc`. (Where not, as when
    it was forked with pages in reserve, call this once for each page.)

    If all holders of a page write in this call, the last in order keeps it. Rows are served in the order given, as long
    as the pages last; the first that cannot be served and all after it are left untouched.

    Args:
      pages: donated.
      rows: i32[C], distinct, in arrival order; padded with R.
      logical: i32[C] logical page that the row writes; rows that have no such page need nothing.

    Returns:
      pages, copies i32[C * G, 2] (source, destination) for `copy_pages`, padded with (NULL_PAGE, N + k), ok bool[C].
    """
    G, R, P = pages.table.shape
    C, N = rows.shape[0], pages.total_pages
    page, copy = _shared_writes(pages, rows, logical)
    ends = jnp.cumsum(jnp.sum(copy, axis=1, dtype=jnp.int32), dtype=jnp.int32)
    capacity = min(N - 1, C * G)
    ok = ends <= jnp.minimum(pages.num_unowned, capacity)
    copy = (copy & ok[:, None]).reshape(-1)
    total = jnp.sum(copy, dtype=jnp.int32)

    pages, taken = take(pages, total, capacity)
    ordinal = jnp.clip(jnp.cumsum(copy, dtype=jnp.int32) - 1, 0, capacity - 1)
    lane = jnp.arange(C * G, dtype=jnp.int32)
    source = jnp.where(copy, page.reshape(-1), NULL_PAGE)
    target = jnp.where(copy, taken[ordinal], N + lane)
    row = jnp.where(copy, rows[lane // G], R + lane)
    pages = pages.replace(
        table=pages.table.at[lane % G, row, jnp.clip(logical, 0, P - 1)[lane // G]].set(
            target, mode="drop", unique_indices=True
        ),
        # The old page keeps at least one owner: a holder that does not write, or the last writer.
        ref_counts=pages.ref_counts.at[jnp.where(copy, source, N)].add(-1, mode="drop"),
    )
    return pages, jnp.stack([source, target], axis=1), ok
