"""Counting owners up and down, and pins: owners that are no table entries."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pagedjax.pages.queue import last_occurrence, put
from pagedjax.pages.state import NULL_PAGE, Pages


def acquire(pages: Pages, ids: jax.Array, mask: jax.Array) -> Pages:
    """One more owner for each masked entry of ids i32[K]; an unowned page is revived and its queue entry goes stale."""
    N = pages.total_pages
    # The stamp says which pages are unowned. Reading ref_counts here would make XLA copy them: an update must depend
    # on the reads before it. For the same reason the last update of the stamps goes by `last`.
    revived = mask & (pages.stamp[jnp.where(mask, ids, 0)] != 0)
    stamp = pages.stamp.at[jnp.where(revived, ids, N)].set(0, mode="drop")
    stamp, last = last_occurrence(stamp, ids, revived)
    return pages.replace(
        ref_counts=pages.ref_counts.at[jnp.where(mask, ids, N)].add(1, mode="drop"),
        stamp=stamp.at[jnp.where(last, ids, N)].set(0, mode="drop"),
        num_unowned=pages.num_unowned - jnp.sum(last, dtype=jnp.int32),
    )


def release(pages: Pages, ids: jax.Array, mask: jax.Array) -> Pages:
    """One owner less for each masked entry of ids i32[K]; those that reach zero are queued in this order (see `put`).

    A count that was zero goes below it and the page is not queued again: `check` reports that as a double release.
    """
    ref_counts = pages.ref_counts.at[jnp.where(mask, ids, pages.total_pages)].add(-1, mode="drop")
    unowned = mask & (ref_counts[jnp.where(mask, ids, 0)] == 0)
    return put(pages.replace(ref_counts=ref_counts), ids, unowned)


def _real(pages: Pages, ids: jax.Array) -> jax.Array:
    return (ids > NULL_PAGE) & (ids < pages.total_pages)


def pin(pages: Pages, ids: jax.Array) -> tuple[Pages, None]:
    """Keep pages from being taken while a copy or report that reads them is in flight: the *pending* state.

    Args:
      ids: i32[K] pages, an id as often as it is to be counted; padded with N. NULL_PAGE is ignored.

    Returns:
      pages (donated), None. Undo with `unpin` of the same ids.
    """
    return acquire(pages, ids, _real(pages, ids)), None


def unpin(pages: Pages, ids: jax.Array) -> tuple[Pages, None]:
    """Take back a `pin` of ids i32[K] (padded with N); pages without another owner are queued in the order of the list.

    Returns:
      pages (donated), None.
    """
    return release(pages, ids, _real(pages, ids)), None
