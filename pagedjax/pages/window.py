"""Giving back pages that no later token can see, where layers see a window."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pagedjax.pages.references import release
from pagedjax.pages.state import NULL_PAGE, Pages

SLIDE_WIDTH = 8
"""Pages of a row and group that one trip of `slide` gives back: a step of decoding gives back one, a chunk dozens."""


def first_needed(positions: jax.Array, windows: Sequence[int], page_size: int) -> jax.Array:
    """First logical page that a query at `positions`, or any later one, sees.

    Args:
      positions: i32[C] of the next token of each row.
      windows: static; tokens that a query sees in each group, itself included; 0: all.

    Returns:
      i32[G, C]
    """
    window = np.asarray(windows, np.int32)[:, None]
    begin = jnp.maximum(positions[None, :] - jnp.asarray(window) + 1, 0) // page_size
    return jnp.where(jnp.asarray(window > 0), begin, 0)


def slide(pages: Pages, rows: jax.Array, first: jax.Array, *, width: int = SLIDE_WIDTH) -> tuple[Pages, jax.Array]:
    """Give back what lies before the first page that a row still needs, group by group. NULL_PAGE takes its place.

    What is given back is always the beginning of a table row, so the entry before `first` tells whether there is
    anything to do: where not, this costs one look-up a row and group. A page that others hold too stays with them; a
    published one stays cached. A row's pages are queued from the back to the front, as in a release.

    Args:
      pages: donated.
      rows: i32[C], distinct; padded with R.
      first: i32[G, C] logical pages, see `first_needed`; 0 gives nothing back.
      width: static, pages that a row gives back in a group at a time.

    Returns:
      pages, i32 table entries given back.
    """
    G, _, P = pages.table.shape
    C = rows.shape[0]
    group = jnp.arange(G, dtype=jnp.int32)[:, None, None]
    row = rows[None, :, None]
    end = jnp.clip(first, 0, pages.num_pages.at[rows].get(mode="fill", fill_value=0)[None, :])

    def look(table: jax.Array, end: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
        """(columns, pages) i32[G, C, width] before `end`, the last first; NULL_PAGE where there is none."""
        column = end[:, :, None] - 1 - jnp.arange(width, dtype=jnp.int32)[None, None, :]
        page = table.at[group, row, jnp.maximum(column, 0)].get(mode="fill", fill_value=NULL_PAGE)
        return column, jnp.where(column >= 0, page, NULL_PAGE)

    def unfinished(carry):
        pages, end, _ = carry
        return jnp.any(look(pages.table, end, 1)[1] != NULL_PAGE)

    def give_back(carry):
        pages, end, count = carry
        column, page = look(pages.table, end, width)
        held = page != NULL_PAGE
        lane = jnp.arange(G * C * width, dtype=jnp.int32).reshape(held.shape)
        target = jnp.where(held, column, P + lane)
        table = pages.table.at[group, row, target].set(NULL_PAGE, mode="drop", unique_indices=True)
        walk = page.transpose(1, 0, 2).reshape(-1)
        pages = release(pages.replace(table=table), walk, walk != NULL_PAGE)
        return pages, jnp.maximum(end - width, 0), count + jnp.sum(held, dtype=jnp.int32)

    pages, _, count = lax.while_loop(unfinished, give_back, (pages, end, jnp.zeros((), jnp.int32)))
    return pages, count
