"""Entering full pages into the prefix index, each content once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pagedjax.pages.prefix import Chain, bucket_of, find_chain, require_one_group
from pagedjax.pages.queue import age
from pagedjax.pages.references import acquire, release
from pagedjax.pages.state import NULL_PAGE, Pages

_TAKEN = np.uint32(0xFFFFFFFF)


def publish(
    pages: Pages, rows: jax.Array, tokens: jax.Array, lengths: jax.Array, namespaces: jax.Array
) -> tuple[Pages, jax.Array]:
    """Enter the rows' full pages into the index.

    Where a published page with the same past and content exists the row is pointed to that one and its own copy is
    given up. A page whose bucket is full of owned pages stays unpublished, and so do the row's pages after it; a later
    call tries again. The rows are taken one after another, so that equal rows in one call end up with the same pages.

    Args:
      pages: donated; one group.
      rows: i32[C], distinct; padded with R anywhere.
      tokens: i32[C, M] token ids of each row.
      lengths: i32[C] tokens whose keys and values are final; only pages they fill are published.
      namespaces: i32[C], 0 <= id < 2**31 - N; see `match`.

    Returns:
      pages, num_published i32[C] leading pages of the row that are in the index now.

    Raises:
      ValueError: more than one group.
    """
    require_one_group(pages, "publish")
    C, R = rows.shape[0], pages.max_rows
    if tokens.shape[1] < pages.page_size:
        return pages, jnp.zeros_like(rows)
    # Rows with nothing to do cost no trip.
    busy = (rows < R) & (lengths >= pages.page_size)
    order = jnp.argsort(~busy, stable=True).astype(jnp.int32)
    num_busy = jnp.sum(busy, dtype=jnp.int32)

    def unfinished(carry):
        return carry[0] < num_busy

    def one(carry):
        k, pages, counts = carry
        i = order[jnp.minimum(k, C - 1)]
        pages, count = _publish_row(pages, rows[i], tokens[i], lengths[i], namespaces[i])
        return k + 1, pages, counts.at[i].set(count)

    start = (jnp.zeros_like(num_busy), pages, jnp.zeros_like(rows))
    _, pages, counts = lax.while_loop(unfinished, one, start)
    return pages, counts


def _publish_row(
    pages: Pages, row: jax.Array, tokens: jax.Array, length: jax.Array, namespace: jax.Array
) -> tuple[Pages, jax.Array]:
    """Deduplicate and publish one row: (pages, i32 leading pages in the index)."""
    table_row = pages.table.at[0, row].get(mode="fill", fill_value=NULL_PAGE)
    used = jnp.sum(jnp.cumsum(table_row == NULL_PAGE, dtype=jnp.int32) == 0, dtype=jnp.int32)
    chain = find_chain(pages, tokens, namespace, jnp.minimum(length // pages.page_size, used))
    Pt = chain.page.shape[0]
    num_full = jnp.minimum(jnp.minimum(length // pages.page_size, used), Pt)
    index = jnp.arange(Pt, dtype=jnp.int32)

    mine = table_row[:Pt]
    moved = (index < chain.length) & (chain.page != mine)
    pages = acquire(pages, chain.page, moved)
    mine = jnp.where(moved, chain.page, mine)
    pages = pages.replace(
        table=pages.table.at[0, row, jnp.where(moved, index, pages.max_pages_per_row + index)].set(mine, mode="drop")
    )
    pages = release(pages, table_row[:Pt][::-1], moved[::-1])

    fresh = (index >= chain.length) & (index < num_full)
    way, replaced, fresh = _choose_ways(pages, chain, fresh)
    return _enter(pages, chain, mine, namespace, way, replaced, fresh), chain.length + jnp.sum(fresh, dtype=jnp.int32)


def _choose_ways(pages: Pages, chain: Chain, fresh: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Where in its bucket each fresh page goes: stale entries first, then what is taken next, never an owned page.

    Returns:
      way i32[Pt], replaced i32[Pt] (the page that loses its place, NULL_PAGE if none), fresh bool[Pt] those that have a
      place.
    """
    Pt, W = chain.page.shape[0], pages.buckets.shape[1]
    bucket = bucket_of(pages, chain.hash)
    index = jnp.arange(Pt, dtype=jnp.int32)
    # Among the row's fresh pages of one bucket, the k-th gets the k-th best way.
    order = jnp.argsort(jnp.where(fresh, bucket, pages.buckets.shape[0]), stable=True).astype(jnp.int32)
    ranked = bucket[order]
    new_run = (index == 0) | (ranked != jnp.roll(ranked, 1))
    rank = jnp.zeros_like(index).at[order].set(index - lax.cummax(jnp.where(new_run, index, 0)))

    entry = pages.buckets[bucket]  # [Pt, W]
    listed = (pages.parent[entry] != 0) & (bucket_of(pages, pages.hash[entry]) == bucket[:, None])
    lane = jnp.broadcast_to(jnp.arange(W, dtype=jnp.uint32), entry.shape)
    score = jnp.where(pages.ref_counts[entry] > 0, _TAKEN, W + age(pages, entry))
    score = jnp.where(listed, score, lane)
    best = jnp.argsort(score, axis=1, stable=True).astype(jnp.int32)
    choice = jnp.minimum(rank, W - 1)[:, None]
    way = jnp.take_along_axis(best, choice, axis=1)[:, 0]
    placed = (rank < W) & (jnp.take_along_axis(score, way[:, None], axis=1)[:, 0] != _TAKEN)
    fresh = fresh & (jnp.cumsum(fresh & ~placed, dtype=jnp.int32) == 0)
    at_way = jnp.take_along_axis(entry, way[:, None], axis=1)[:, 0]
    was_listed = jnp.take_along_axis(listed, way[:, None], axis=1)[:, 0]
    return way, jnp.where(fresh & was_listed, at_way, NULL_PAGE), fresh


def _enter(
    pages: Pages,
    chain: Chain,
    mine: jax.Array,
    namespace: jax.Array,
    way: jax.Array,
    replaced: jax.Array,
    fresh: jax.Array,
) -> Pages:
    """Write links, content and bucket entries of the fresh pages of a row whose pages are mine i32[Pt]."""
    N, Bk = pages.total_pages, pages.buckets.shape[0]
    lane = jnp.arange(mine.shape[0], dtype=jnp.int32)
    first = lane == 0
    before = jnp.roll(mine, 1)
    parent = jnp.where(first, N + namespace, before)
    parent_generation = jnp.where(first, 0, pages.generation[before])
    page = jnp.where(fresh, mine, N + lane)
    bucket = jnp.where(fresh, bucket_of(pages, chain.hash), Bk + lane)

    def put(values: jax.Array, update: jax.Array) -> jax.Array:
        return values.at[page].set(update, mode="drop", unique_indices=True)

    unlisted = pages.parent.at[jnp.where(replaced == NULL_PAGE, N, replaced)].set(0, mode="drop")
    return pages.replace(
        parent=put(unlisted, parent),
        parent_generation=put(pages.parent_generation, parent_generation),
        hash=put(pages.hash, chain.hash),
        tokens=put(pages.tokens, chain.tokens),
        buckets=pages.buckets.at[bucket, way].set(mine, mode="drop", unique_indices=True),
    )
