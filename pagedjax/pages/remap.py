"""Moving table rows: fork, release, reorder, preempt."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pagedjax.pages.references import release
from pagedjax.pages.state import NULL_PAGE, Pages


def remap(pages: Pages, rows: jax.Array, src: jax.Array) -> tuple[Pages, jax.Array]:
    """Let each row take over, and share, the pages that row `src` had before the call; what it had itself is given up.

    src = R makes the row empty (a release), src = another row is a fork, a permutation reorders beams, src = row does
    nothing; all in one call. Pages without an owner are queued, row by row in the order given, a chain's tail before
    its head.

    Args:
      pages: donated.
      rows: i32[C], distinct; padded with R.
      src: i32[C], any rows, repeated ones too; R for empty.

    Returns:
      pages, i32 number of pages that lost their last owner.
    """
    R, N = pages.max_rows, pages.total_pages
    before = pages.num_unowned
    src = jnp.where(rows < R, src, R)
    old = pages.table.at[:, rows].get(mode="fill", fill_value=NULL_PAGE)
    new = pages.table.at[:, src].get(mode="fill", fill_value=NULL_PAGE)
    num_pages = pages.num_pages.at[src].get(mode="fill", fill_value=0)
    # Up before down: a page that only moves between rows is never without an owner in between.
    ref_counts = pages.ref_counts.at[jnp.where(new == NULL_PAGE, N, new)].add(1, mode="drop")
    pages = pages.replace(
        table=pages.table.at[:, rows].set(new, mode="drop"),
        num_pages=pages.num_pages.at[rows].set(num_pages, mode="drop"),
        ref_counts=ref_counts,
    )
    walk = old[:, :, ::-1].transpose(1, 0, 2).reshape(-1)
    pages = release(pages, walk, walk != NULL_PAGE)
    return pages, pages.num_unowned - before
