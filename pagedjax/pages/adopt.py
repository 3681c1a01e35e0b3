"""Hits at token grain: a row begins with a copy of a cached page whose first tokens are its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pagedjax.pages.alloc import alloc
from pagedjax.pages.children import find_child, root_hash
from pagedjax.pages.references import acquire, release
from pagedjax.pages.state import NO_TOKEN, NULL_PAGE, Pages


def adopt(
    pages: Pages, rows: jax.Array, tokens: jax.Array, lengths: jax.Array, namespaces: jax.Array
) -> tuple[Pages, jax.Array, jax.Array]:
    """Give rows that `match` has just served one page more, to be filled by a copy of a page that begins as they go on.

    The source keeps its content and its place in the index, and counts as used now. A row for which nothing is found, or
    no page is left, keeps what it has. Never covers the last token.

    Args:
      pages: donated; one group.
      rows, tokens, lengths, namespaces: as given to `match`.

    Returns:
      pages, copies i32[C, 2] (source, destination) for `copy_pages`, padded with (NULL_PAGE, N + k), num_tokens i32[C]
      that the copy is good for: the rest of the page is to be written over.

    Raises:
      ValueError: more than one group.
    """
    if pages.num_groups != 1:
        raise ValueError(f"adopt: a hit within a page needs num_groups = 1, got {pages.num_groups}")
    C, N, S, P = rows.shape[0], pages.total_pages, pages.page_size, pages.max_pages_per_row
    have = pages.num_pages.at[rows].get(mode="fill", fill_value=P)
    column = jnp.maximum(have - 1, 0)
    last = pages.table.at[0, rows, column].get(mode="fill", fill_value=NULL_PAGE)
    is_root = have == 0
    parent = jnp.where(is_root, N + namespaces, last)
    generation = jnp.where(is_root, 0, pages.generation[last])
    hash_ = jnp.where(is_root, root_hash(pages, namespaces), pages.hash[last])
    # The next S tokens, less the last one of all.
    position = have[:, None] * S + jnp.arange(S, dtype=jnp.int32)[None, :]
    following = jnp.take_along_axis(tokens, jnp.minimum(position, tokens.shape[1] - 1), axis=1)
    following = jnp.where(position < jnp.minimum(lengths, tokens.shape[1] + 1)[:, None] - 1, following, NO_TOKEN)
    source, agree = jax.vmap(find_child, in_axes=(None, 0, 0, 0, 0))(pages, parent, generation, hash_, following)
    wanted = (agree > 0) & (have < P)

    pages = acquire(pages, source, wanted)  # so that nobody takes it before it is copied
    pages, ok = alloc(pages, rows, wanted.astype(jnp.int32))
    pages = release(pages, source, wanted)
    got = wanted & ok
    target = pages.table.at[0, rows, jnp.minimum(have, P - 1)].get(mode="fill", fill_value=NULL_PAGE)
    lane = jnp.arange(C, dtype=jnp.int32)
    copies = jnp.stack([jnp.where(got, source, NULL_PAGE), jnp.where(got, target, N + lane)], axis=1)
    return pages, copies, jnp.where(got, agree, 0)
