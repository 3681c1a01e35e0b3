"""Growing rows by new pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pagedjax.pages.queue import take
from pagedjax.pages.state import Pages


def alloc(pages: Pages, rows: jax.Array, need: jax.Array, *, max_total: int | None = None) -> tuple[Pages, jax.Array]:
    """Append `need` new pages to each row, in every group.

    The rows are served in the order given, as long as the pages last: the first row that cannot be served and all after
    it are left untouched. A row cannot be served if its pages are not there, if it would exceed P logical pages, or
    need < 0.

    Args:
      pages: donated.
      rows: i32[C], distinct, in arrival order; padded with R.
      need: i32[C] new logical pages; ignored where the row is padded.
      max_total: static bound on the physical pages of this call (G x the sum of need), which sets its cost; rows beyond
        it are not served. None: as many as C rows or the pool can have.

    Returns:
      pages, ok bool[C]: a row of the strict prefix that was served (padding and rows with need 0 included).
    """
    G, R, P = pages.table.shape
    C, N = rows.shape[0], pages.total_pages
    limit = min(N - 1, C * G * P)
    capacity = limit if max_total is None else max(1, min(limit, max_total))
    real = rows < R
    have = pages.num_pages.at[rows].get(mode="fill", fill_value=0)
    possible = ~real | ((need >= 0) & (need <= P - have))
    # What is impossible asks for nothing here, so that the sum cannot overflow.
    wanted = jnp.where(real & possible, need, 0)
    ends = jnp.cumsum(wanted * G, dtype=jnp.int32)
    served = possible & (ends <= jnp.minimum(pages.num_unowned, capacity))
    ok = jnp.cumsum(~served, dtype=jnp.int32) == 0
    grown = jnp.where(ok, wanted, 0)
    total = jnp.sum(grown, dtype=jnp.int32) * G

    pages, taken = take(pages, total, capacity)
    # Page number k goes to the row in whose range it falls; within the row group by group, so that each group's pages
    # adjoin.
    ordinal = jnp.arange(capacity, dtype=jnp.int32)
    lane = jnp.searchsorted(ends, ordinal, side="right", method="scan_unrolled").astype(jnp.int32)
    lane = jnp.minimum(lane, C - 1)
    local = ordinal - (ends[lane] - wanted[lane] * G)
    width = jnp.maximum(wanted[lane], 1)
    row = jnp.where(ordinal < total, rows[lane], R + ordinal)
    return pages.replace(
        table=pages.table.at[local // width, row, have[lane] + local % width].set(
            taken, mode="drop", unique_indices=True
        ),
        num_pages=pages.num_pages.at[rows].add(grown, mode="drop"),
    ), ok
