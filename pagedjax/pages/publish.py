"""Entering pages into the prefix index, each content once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pagedjax.pages.children import find_child, hash_before, root_hash
from pagedjax.pages.prefix import Chain, bucket_of, find_chain, group_namespaces
from pagedjax.pages.queue import age
from pagedjax.pages.references import acquire, release
from pagedjax.pages.state import NO_TOKEN, NULL_PAGE, Pages

_TAKEN = np.uint32(0xFFFFFFFF)


def publish(
    pages: Pages,
    rows: jax.Array,
    tokens: jax.Array,
    lengths: jax.Array,
    namespaces: jax.Array,
    tails: jax.Array | None = None,
) -> tuple[Pages, jax.Array]:
    """Enter the rows' full pages into the index, each group's in a chain of its own, and the unfilled last page of rows that
    end.

    Where a published page with the same past and content exists the row is pointed to that one and its own copy is
    given up. A page whose bucket is full of owned pages stays unpublished, and so do the row's pages after it; a later
    call tries again. So does what comes behind a page that was given back (see `slide`) and is not in the index any more.
    The rows are taken one after another, so that equal rows in one call end up with the same pages.

    Args:
      pages: donated.
      rows: i32[C], distinct; padded with R anywhere.
      tokens: i32[C, M] token ids of each row.
      lengths: i32[C] tokens whose keys and values are final; only pages they fill are published.
      namespaces: i32[C], 0 <= id < (2**31 - N) / G; see `match`.
      tails: bool[C] rows that will write no more and are released next: their unfilled last page is entered too, for
        `adopt`, if nobody else holds it and no listed page begins with its tokens. None: no row.

    Returns:
      pages, num_published i32[C] leading full pages of the row that are in the index now, in every group.
    """
    C, R, G = rows.shape[0], pages.max_rows, pages.num_groups
    if tokens.shape[1] < pages.page_size:
        return pages, jnp.zeros_like(rows)
    # No row, by a comparison: with a constant, XLA's simplified program copies arrays of the state.
    tails = lengths < 0 if tails is None else tails
    # Rows with nothing to do cost no trip.
    busy = (rows < R) & ((lengths >= pages.page_size) | (tails & (lengths > 0)))
    order = jnp.argsort(~busy, stable=True).astype(jnp.int32)
    num_busy = jnp.sum(busy, dtype=jnp.int32)
    namespaces = group_namespaces(pages, namespaces)

    def unfinished(carry):
        return carry[0] < num_busy * G

    def one(carry):
        k, pages, counts = carry
        i, group = order[jnp.minimum(k // G, C - 1)], k % G
        pages, count, again = _publish_row(pages, group, rows[i], tokens[i], lengths[i], namespaces[group, i], tails[i])
        # Every repetition finds at least one page more in the index.
        return k + jnp.where(again, 0, 1), pages, jnp.where(again, counts, counts.at[i].min(count))

    start = (jnp.zeros_like(num_busy), pages, jnp.where(busy, pages.max_pages_per_row, jnp.zeros_like(rows)))
    _, pages, counts = lax.while_loop(unfinished, one, start)
    return pages, counts


def _publish_row(
    pages: Pages,
    group: jax.Array,
    row: jax.Array,
    tokens: jax.Array,
    length: jax.Array,
    namespace: jax.Array,
    tail: jax.Array,
) -> tuple[Pages, jax.Array, jax.Array]:
    """Deduplicate and publish one row of one group's table: (pages, i32 leading full pages in the index, bool whether to
    call it again).

    A page can be published already with a past that is not in the index any more. It gets its new place, and what
    follows it in the index is in reach again: only a second look can find the row's next pages there.
    """
    S = pages.page_size
    table_row = pages.table.at[group, row].get(mode="fill", fill_value=NULL_PAGE)
    used = pages.num_pages.at[row].get(mode="fill", fill_value=0)
    tokens = jnp.where(jnp.arange(tokens.shape[0], dtype=jnp.int32) < length, tokens, NO_TOKEN)
    chain = find_chain(pages, tokens, namespace, jnp.minimum(length // S, used))
    Pt = chain.page.shape[0]
    num_full = jnp.minimum(jnp.minimum(length // S, used), Pt)
    index = jnp.arange(Pt, dtype=jnp.int32)

    mine = table_row[:Pt]
    published = pages.parent[mine] != 0
    known = index < chain.length
    gone = mine == NULL_PAGE  # given back; the index may still know the page that had this place
    moved = known & (chain.page != mine) & ~gone
    pages = acquire(pages, chain.page, moved)
    mine = jnp.where(known, chain.page, mine)
    pages = pages.replace(
        table=pages.table.at[group, row, jnp.where(moved, index, pages.max_pages_per_row + index)].set(
            mine, mode="drop"
        )
    )
    pages = release(pages, table_row[:Pt][::-1], moved[::-1])

    fresh = ~known & (index < num_full)
    fresh = fresh & ~jnp.any(fresh & gone)
    way, replaced, placed = _choose_ways(pages, chain.hash, fresh)
    fresh = fresh & (jnp.cumsum(fresh & ~placed, dtype=jnp.int32) == 0)
    linked_anew = fresh & published
    fresh = fresh & (jnp.cumsum(linked_anew, dtype=jnp.int32) - linked_anew.astype(jnp.int32) == 0)
    again = linked_anew.any()
    replaced = jnp.where(fresh, replaced, NULL_PAGE)
    num_published = chain.length + jnp.sum(fresh, dtype=jnp.int32)

    pages = _enter(pages, chain, mine, namespace, way, replaced, fresh)
    # Read after that write and before the next, which depends on it: any other order makes XLA copy the arrays.
    tail = tail & ~again & (length % S > 0) & (used > num_full) & (num_full < Pt) & (num_published == num_full)
    ends = tail & (index == num_full) & _is_news(pages, chain, mine, namespace, num_full)
    return _list_children(pages, chain, mine, namespace, fresh, ends), num_published, again


def _links(pages: Pages, mine: jax.Array, namespace: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(parent i32[Pt], its generation u32[Pt]) of a row's pages mine i32[Pt]."""
    first = jnp.arange(mine.shape[0], dtype=jnp.int32) == 0
    before = jnp.roll(mine, 1)
    parent = jnp.where(first, pages.total_pages + namespace, before)
    return parent, jnp.where(first, 0, pages.generation[before])


def _is_news(pages: Pages, chain: Chain, mine: jax.Array, namespace: jax.Array, i: jax.Array) -> jax.Array:
    """bool: page i, unfilled, is held by its row alone, and no listed page begins with its tokens."""
    i = jnp.minimum(i, mine.shape[0] - 1)
    parent, generation = _links(pages, mine, namespace)
    hash_ = jnp.where(i == 0, root_hash(pages, namespace), chain.hash[jnp.maximum(i - 1, 0)])
    _, agree = find_child(pages, parent[i], generation[i], hash_, chain.tokens[i])
    length = jnp.sum(chain.tokens[i] >= 0, dtype=jnp.int32)
    return (agree < length) & (pages.ref_counts[mine[i]] == 1)


def _choose_ways(pages: Pages, hash_: jax.Array, fresh: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Where in its bucket each fresh page goes: stale entries first, then what is taken next, never an owned page.

    Returns:
      way i32[Pt], replaced i32[Pt] (the page that loses its place, NULL_PAGE if none), placed bool[Pt] those that have a
      place.
    """
    bucket = bucket_of(pages, hash_)
    entry = pages.buckets[bucket]  # [Pt, W]
    listed = (pages.parent[entry] != 0) & (bucket_of(pages, pages.hash[entry]) == bucket[:, None])
    way, at_way, replaces, placed = _ways(pages, bucket, entry, listed, jnp.zeros_like(listed), fresh)
    return way, jnp.where(replaces, at_way, NULL_PAGE), placed


def _ways(
    pages: Pages, bucket: jax.Array, entry: jax.Array, listed: jax.Array, dear: jax.Array, fresh: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Ways for fresh pages in lists entry i32[Pt, W]; `dear` entries go after all others.

    Returns:
      way i32[Pt], what is there now i32[Pt], whether that is replaced bool[Pt], placed bool[Pt].
    """
    Pt, W = entry.shape
    index = jnp.arange(Pt, dtype=jnp.int32)
    # Among the row's fresh pages of one bucket, the k-th gets the k-th best way.
    order = jnp.argsort(jnp.where(fresh, bucket, pages.buckets.shape[0]), stable=True).astype(jnp.int32)
    ranked = bucket[order]
    new_run = (index == 0) | (ranked != jnp.roll(ranked, 1))
    rank = jnp.zeros_like(index).at[order].set(index - lax.cummax(jnp.where(new_run, index, 0)))

    lane = jnp.broadcast_to(jnp.arange(W, dtype=jnp.uint32), entry.shape)
    # An age has 31 bits.
    oldest_first = jnp.where(dear, np.uint32(1 << 31), np.uint32(W)) + age(pages, entry)
    score = jnp.where(pages.ref_counts[entry] > 0, _TAKEN, oldest_first)
    score = jnp.where(listed, score, lane)
    best = jnp.argsort(score, axis=1, stable=True).astype(jnp.int32)
    choice = jnp.minimum(rank, W - 1)[:, None]
    way = jnp.take_along_axis(best, choice, axis=1)[:, 0]
    placed = fresh & (rank < W) & (jnp.take_along_axis(score, way[:, None], axis=1)[:, 0] != _TAKEN)
    at_way = jnp.take_along_axis(entry, way[:, None], axis=1)[:, 0]
    was_listed = jnp.take_along_axis(listed, way[:, None], axis=1)[:, 0]
    return way, at_way, placed & was_listed, placed


def _enter(
    pages: Pages,
    chain: Chain,
    mine: jax.Array,
    namespace: jax.Array,
    way: jax.Array,
    replaced: jax.Array,
    fresh: jax.Array,
) -> Pages:
    """Write links, content and bucket entries of the fresh full pages of a row whose pages are, or were, mine i32[Pt]."""
    Bk = pages.buckets.shape[0]
    lane = jnp.arange(mine.shape[0], dtype=jnp.int32)
    bucket = jnp.where(fresh, bucket_of(pages, chain.hash), Bk + lane)
    pages = pages.replace(parent=_without(pages, replaced))
    pages = _write(pages, chain, mine, namespace, fresh)
    return pages.replace(buckets=pages.buckets.at[bucket, way].set(mine, mode="drop", unique_indices=True))


def _list_children(
    pages: Pages, chain: Chain, mine: jax.Array, namespace: jax.Array, fresh: jax.Array, ends: jax.Array
) -> Pages:
    """List fresh pages and the unfilled last one under what comes before them; the latter is published with its place."""
    Bk = pages.buckets.shape[0]
    lane = jnp.arange(mine.shape[0], dtype=jnp.int32)
    bucket = bucket_of(pages, jnp.where(lane == 0, root_hash(pages, namespace), jnp.roll(chain.hash, 1)))
    entry = pages.children[bucket]
    hash_, alive = hash_before(pages, entry)
    listed = alive & (bucket_of(pages, hash_) == bucket[:, None])
    # An unfilled page is in no other list: without its place it is out of reach.
    unfilled = pages.tokens[entry, -1] == NO_TOKEN
    way, at_way, replaces, placed = _ways(pages, bucket, entry, listed, unfilled, fresh | ends)
    lost = replaces & jnp.take_along_axis(unfilled, way[:, None], axis=1)[:, 0]
    pages = pages.replace(parent=_without(pages, jnp.where(lost, at_way, NULL_PAGE)))
    pages = _write(pages, chain, mine, namespace, ends & placed)
    bucket = jnp.where(placed, bucket, Bk + lane)
    return pages.replace(children=pages.children.at[bucket, way].set(mine, mode="drop", unique_indices=True))


def _without(pages: Pages, replaced: jax.Array) -> jax.Array:
    """`parent` after pages replaced i32[Pt] (padded with NULL_PAGE) are published no more."""
    return pages.parent.at[jnp.where(replaced == NULL_PAGE, pages.total_pages, replaced)].set(0, mode="drop")


def _write(pages: Pages, chain: Chain, mine: jax.Array, namespace: jax.Array, mask: jax.Array) -> Pages:
    """Links and content of the masked pages of a row."""
    parent, parent_generation = _links(pages, mine, namespace)
    page = jnp.where(mask, mine, pages.total_pages + jnp.arange(mine.shape[0], dtype=jnp.int32))

    def put(values: jax.Array, update: jax.Array) -> jax.Array:
        return values.at[page].set(update, mode="drop", unique_indices=True)

    return pages.replace(
        parent=put(pages.parent, parent),
        parent_generation=put(pages.parent_generation, parent_generation),
        hash=put(pages.hash, chain.hash),
        tokens=put(pages.tokens, chain.tokens),
    )
