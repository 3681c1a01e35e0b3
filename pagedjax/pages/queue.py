"""The one queue of unowned pages: taking from its front, putting back at either end, keeping it short.

Entries are never removed from the middle. A page that a prefix hit revives leaves its entry behind; the entry is
*stale*, as the page's stamp no longer names its position. Stale entries are skipped when the front reaches them, and
squeezed out when the ring is full.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.pages.state import Pages

_TAKE_WINDOW = 128
"""Most queue entries looked at in one trip of `take`; a trip has a fixed cost of some microseconds."""

_SQUEEZE_WINDOW = 512

_LOOK_WINDOW = 256
"""Queue entries that `upcoming` looks at, or four for each page to report, whichever is more."""


def stamp_of(position: jax.Array) -> jax.Array:
    """The stamp u32 of an unowned page with its live entry at `position`: odd, unlike marks of `last_occurrence`."""
    return (position << 1) | 1


def age(pages: Pages, ids: jax.Array) -> jax.Array:
    """Distance u32 of unowned pages from the front of the queue: the smallest is taken first."""
    return ((pages.stamp[ids] >> 1) - pages.head) & 0x7FFFFFFF


def _slot(pages: Pages, position: jax.Array) -> jax.Array:
    """Index into the ring, i32."""
    return (position & (pages.queue.shape[0] - 1)).astype(jnp.int32)


def _entries(pages: Pages, queue: jax.Array, stamp: jax.Array, first: jax.Array, window: int):
    """The queue from position `first` on: (positions u32[window], page ids i32[window], live bool[window])."""
    lane = jnp.arange(window, dtype=jnp.uint32)
    position = first + lane
    page = queue[_slot(pages, position)]
    # A difference of wrapping positions is exact; comparing the positions themselves is not.
    live = (lane < pages.tail - first) & (stamp[page] == stamp_of(position))
    return position, page, live


def take(pages: Pages, total: jax.Array, capacity: int) -> tuple[Pages, jax.Array]:
    """Take the `total` least recently released pages; each gets one owner, a new generation and no content.

    Args:
      total: i32, at most num_unowned and at most `capacity`; 0 costs no look at the queue.
      capacity: static bound.

    Returns:
      pages, i32[capacity] the pages taken, in queue order; beyond `total`, distinct ids >= N.
    """
    window = min(_TAKE_WINDOW, capacity)
    N = pages.total_pages

    def unfinished(carry):
        position, taken, _ = carry
        return (taken < total) & (position != pages.tail)

    def look(carry):
        first, taken, buffer = carry
        _, page, live = _entries(pages, pages.queue, pages.stamp, first, window)
        ordinal = taken + jnp.cumsum(live, dtype=jnp.int32)
        chosen = live & (ordinal <= total)
        lane = jnp.arange(window, dtype=jnp.int32)
        buffer = buffer.at[jnp.where(chosen, ordinal - 1, capacity + lane)].set(page, mode="drop", unique_indices=True)
        taken = taken + jnp.sum(chosen, dtype=jnp.int32)
        after_last = jnp.max(jnp.where(chosen, lane + 1, 0)).astype(jnp.uint32)
        rest = jnp.minimum(pages.tail - first, jnp.uint32(window))
        return first + jnp.where(taken < total, rest, after_last), taken, buffer

    buffer = N + jnp.arange(capacity, dtype=jnp.int32)
    head, taken, buffer = lax.while_loop(unfinished, look, (pages.head, jnp.zeros_like(total), buffer))
    pages = pages.replace(
        head=head,
        num_unowned=pages.num_unowned - taken,
        ref_counts=pages.ref_counts.at[buffer].set(1, mode="drop", unique_indices=True),
        stamp=pages.stamp.at[buffer].set(0, mode="drop", unique_indices=True),
        generation=pages.generation.at[buffer].add(1, mode="drop", unique_indices=True),
        parent=pages.parent.at[buffer].set(0, mode="drop", unique_indices=True),
    )
    return pages, buffer


def upcoming(pages: Pages, width: int) -> tuple[jax.Array, jax.Array]:
    """The published pages that `take` reaches first, as far as the next entries of the queue tell.

    Args:
      width: static, pages to report.

    Returns:
      ids i32[width] in queue order, padded with N; their generations u32[width].
    """
    N, window = pages.total_pages, min(max(_LOOK_WINDOW, 4 * width), pages.queue.shape[0])
    _, page, live = _entries(pages, pages.queue, pages.stamp, pages.head, window)
    chosen = live & (pages.parent[page] != 0)
    place = jnp.where(chosen, jnp.cumsum(chosen, dtype=jnp.int32) - 1, width)
    ids = jnp.full(width, N, jnp.int32).at[place].set(page, mode="drop")
    return ids, pages.generation.at[ids].get(mode="fill", fill_value=0)


def last_occurrence(stamp: jax.Array, ids: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which of the masked entries of `ids` are the last with their id. The stamps of those pages serve as scratch.

    Args:
      stamp: u32[N], 0 at the masked ids; left with marks (even, above 0) there for the caller to overwrite.
      ids: i32[K].  mask: bool[K].

    Returns:
      stamp, bool[K].
    """
    mark = 2 * jnp.arange(1, ids.shape[0] + 1, dtype=jnp.uint32)
    stamp = stamp.at[jnp.where(mask, ids, stamp.shape[0])].max(mark, mode="drop")
    return stamp, mask & (stamp[jnp.where(mask, ids, 0)] == mark)


def put(pages: Pages, ids: jax.Array, mask: jax.Array) -> Pages:
    """Queue pages that lost their last owner: published ones at the tail, others at the front.

    Both in the order of `ids`, where a page counts at its last occurrence: the first published page is taken before the
    second, and of the others the last is taken first.

    Args:
      ids: i32[K].  mask: bool[K], only pages whose count has just reached zero (their stamp is 0).
    """
    K, N, Q = ids.shape[0], pages.total_pages, pages.queue.shape[0]
    stamp, last = last_occurrence(pages.stamp, ids, mask)
    published = last & (pages.parent[jnp.where(mask, ids, 0)] != 0)
    bare = last & ~published
    num_published = jnp.sum(published, dtype=jnp.uint32)
    num_bare = jnp.sum(bare, dtype=jnp.uint32)
    pages = _make_room(pages.replace(stamp=stamp), num_published + num_bare)
    position = jnp.where(
        published,
        pages.tail + jnp.cumsum(published, dtype=jnp.uint32) - 1,
        pages.head - jnp.cumsum(bare, dtype=jnp.uint32),
    )
    lane = jnp.arange(K, dtype=jnp.int32)
    slot = jnp.where(last, _slot(pages, position), Q + lane)
    page = jnp.where(last, ids, N + lane)
    return pages.replace(
        queue=pages.queue.at[slot].set(ids, mode="drop", unique_indices=True),
        stamp=pages.stamp.at[page].set(stamp_of(position), mode="drop", unique_indices=True),
        head=pages.head - num_bare,
        tail=pages.tail + num_published,
        num_unowned=pages.num_unowned + (num_published + num_bare).astype(jnp.int32),
    )


def _make_room(pages: Pages, wanted: jax.Array) -> Pages:
    """Squeeze stale entries out where the ring cannot take `wanted` more; otherwise zero trips.

    At most N - 1 entries are live and Q >= 2 N, so at least N entries were put since the last time: amortised O(1) an
    entry. The entries move towards the head, so a window is read before anything is written over it.
    """
    full = (pages.tail - pages.head) + wanted > pages.queue.shape[0]
    window = min(_SQUEEZE_WINDOW, pages.queue.shape[0])
    N, Q = pages.total_pages, pages.queue.shape[0]

    def unfinished(carry):
        first, *_ = carry
        return full & (first != pages.tail)

    def squeeze(carry):
        first, free, queue, stamp = carry
        _, page, live = _entries(pages, queue, stamp, first, window)
        position = free + jnp.cumsum(live, dtype=jnp.uint32) - 1
        lane = jnp.arange(window, dtype=jnp.int32)
        slot = jnp.where(live, _slot(pages, position), Q + lane)
        queue = queue.at[slot].set(page, mode="drop", unique_indices=True)
        moved = jnp.where(live, page, N + lane)
        stamp = stamp.at[moved].set(stamp_of(position), mode="drop", unique_indices=True)
        step = jnp.minimum(pages.tail - first, jnp.uint32(window))
        return first + step, free + jnp.sum(live, dtype=jnp.uint32), queue, stamp

    start = (pages.head, pages.head, pages.queue, pages.stamp)
    _, tail, queue, stamp = lax.while_loop(unfinished, squeeze, start)
    return pages.replace(queue=queue, stamp=stamp, tail=jnp.where(full, tail, pages.tail))
