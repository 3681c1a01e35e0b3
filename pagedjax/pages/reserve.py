"""Pages in one piece, as systems without page tables have them: reservation at admission, and growth by chunks.

The page table stays the mechanism: a region of memory is pages that adjoin. So the same attention, the same release and the
same accounting serve, and what differs is only which pages a row gets, and when. For comparison, not for serving.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pagedjax.pages.capacity import Allocation
from pagedjax.pages.references import acquire
from pagedjax.pages.state import Pages


def reserve(pages: Pages, rows: jax.Array, need: jax.Array) -> tuple[Pages, jax.Array]:
    """Give each row `need` pages that adjoin, at the lowest place where so many are unowned (first fit).

    The rows are served in the order given, up to the first that finds no gap long enough, however many pages are unowned
    in all: that is external fragmentation. Unlike the other verbs this costs O(N) a row. Where all rows come by their pages
    in this way, memory is used as by a first-fit allocator without compaction, in units of a page.

    Args:
      pages: donated; one group.
      rows: i32[C], distinct, empty, in arrival order; padded with R.
      need: i32[C] pages; ignored where the row is padded.

    Returns:
      pages, ok bool[C]: a row of the strict prefix that was served (padding and rows with need 0 included). A row cannot
      be served if it has pages, if need < 0, or beyond P.

    Raises:
      ValueError: more than one group.
    """
    if pages.num_groups != 1:
        raise ValueError(f"reserve: pages in one piece need num_groups = 1, got {pages.num_groups}")
    R, P, N = pages.max_rows, pages.max_pages_per_row, pages.total_pages
    real = rows < R
    have = pages.num_pages.at[rows].get(mode="fill", fill_value=0)
    possible = ~real | ((have == 0) & (need >= 0) & (need <= P))
    wanted = jnp.where(real & possible, need, 0)
    page = jnp.arange(N, dtype=jnp.int32)

    def place(carry: tuple[jax.Array, jax.Array], one: tuple[jax.Array, jax.Array]):
        free, open_ = carry
        want, may = one
        # Unowned pages that end here.
        run = page - lax.cummax(jnp.where(free, -1, page))
        fits = free & (run >= want)
        ok = open_ & may & ((want == 0) | fits.any())
        first = jnp.argmax(fits).astype(jnp.int32) - want + 1
        taken = ok & (page >= first) & (page < first + want)
        return (free & ~taken, ok), (first, ok)

    unowned = pages.stamp != 0  # NULL_PAGE has no stamp
    _, (first, ok) = lax.scan(place, (unowned, jnp.bool_(True)), (wanted, possible))
    got = jnp.where(ok, wanted, 0)
    column = jnp.arange(P, dtype=jnp.int32)[None, :]
    mask = column < got[:, None]
    ids = jnp.where(mask, first[:, None] + column, N)
    pages = acquire(pages, ids.reshape(-1), mask.reshape(-1))
    target = ids.reshape(-1)
    return pages.replace(
        table=pages.table.at[0, rows[:, None], jnp.where(mask, column, P)].set(ids, mode="drop"),
        num_pages=pages.num_pages.at[rows].add(got, mode="drop"),
        generation=pages.generation.at[target].add(1, mode="drop"),
        parent=pages.parent.at[target].set(0, mode="drop"),
    ), ok


def check_adjoining(pages: Pages, allocation: Allocation) -> list[str]:
    """What contradicts the way in which rows got their pages, in words: rows in more than one piece, or chunks that are not
    whole. Beside `check`, for tests and debugging.

    Args:
      pages: one value, on the host or the device.
      allocation: that all rows got their pages by.
    """
    table, num_pages = (np.asarray(x) for x in jax.device_get((pages.table, pages.num_pages)))
    broken: list[Any] = []
    for row, num in enumerate(num_pages.tolist()):
        size = num if allocation.reserve else allocation.chunk_pages
        if not num:
            continue
        pieces, rest = divmod(num, size)
        chunks = table[0, row, : pieces * size].reshape(pieces, size)
        if rest or (chunks != chunks[:, :1] + np.arange(size)).any():
            broken.append(f"row {row}: pages {table[0, row, :num].tolist()} are not whole pieces of {size} that adjoin")
    return broken
