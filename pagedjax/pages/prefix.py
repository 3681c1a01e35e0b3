"""The prefix index: a radix tree in arrays. Finding the cached pages of a prompt.

A published page names its parent by (page, generation) and holds its token ids; its hash says in which bucket of W
entries it is listed. Looking up a prompt takes all its pages at once: each page's bucket gives W candidates, token ids
and links between the candidates of adjacent pages say which are real, and an associative scan follows the links from
the first page on. A parent that was taken for something else has another generation, so what hung below it is out of
reach and ages out of the queue by itself.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.pages.hashing import prefix_hashes
from pagedjax.pages.references import acquire
from pagedjax.pages.state import NULL_PAGE, Pages


class Chain(NamedTuple):
    """A row's full pages and what the index has for them; Pt = pages that M token ids fill."""

    tokens: jax.Array  # i32[Pt, S]
    hash: jax.Array  # u32[Pt]
    page: jax.Array  # i32[Pt] the published page with this whole past, NULL_PAGE from `length` on
    length: jax.Array  # i32 pages found, a prefix


def group_namespaces(pages: Pages, namespaces: jax.Array) -> jax.Array:
    """i32[G, ...]: each group's chains are in a namespace of their own, as a page holds one group's keys and values."""
    group = jnp.arange(pages.num_groups, dtype=jnp.int32).reshape(-1, *(1,) * namespaces.ndim)
    return namespaces[None] * pages.num_groups + group


def bucket_of(pages: Pages, hash_: jax.Array) -> jax.Array:
    """Index i32 of the bucket for a hash u32."""
    return (hash_ & (pages.buckets.shape[0] - 1)).astype(jnp.int32)


def find_chain(pages: Pages, tokens: jax.Array, namespace: jax.Array, limit: jax.Array) -> Chain:
    """Look up the longest published prefix of one row, at most `limit` pages.

    Args:
      tokens: i32[M].
      namespace: i32.
      limit: i32.
    """
    S, W = pages.page_size, pages.buckets.shape[1]
    Pt = min(tokens.shape[0] // S, pages.max_pages_per_row)
    tokens = tokens[: Pt * S].reshape(Pt, S)
    hash_ = prefix_hashes(tokens, namespace, pages.secret, pages.hash_bits)
    if Pt == 0:
        return Chain(tokens, hash_, jnp.zeros(0, jnp.int32), jnp.zeros_like(limit))
    index = jnp.arange(Pt, dtype=jnp.int32)
    page = pages.buckets[bucket_of(pages, hash_)]  # [Pt, W]
    parent = pages.parent[page]
    # Padding entries are NULL_PAGE, whose parent is 0: unpublished.
    alike = (parent != 0) & jnp.all(pages.tokens[page] == tokens[:, None, :], axis=-1) & (index < limit)[:, None]

    # linked[i, v, w]: candidate w of page i continues candidate v of page i - 1 in its present generation.
    before = jnp.roll(page, 1, axis=0)
    same_page = parent[:, None, :] == before[:, :, None]
    same_generation = pages.parent_generation[page][:, None, :] == pages.generation[before][:, :, None]
    starts = jnp.broadcast_to((parent == pages.total_pages + namespace)[:, None, :], same_page.shape)
    linked = jnp.where((index == 0)[:, None, None], starts, same_page & same_generation) & alike[:, None, :]

    # As maps from a candidate of page i - 1 to one of page i; W stands for none. At most one fits, as `publish` lists
    # no page twice.
    step = jnp.where(jnp.any(linked, axis=-1), jnp.argmax(linked, axis=-1).astype(jnp.int32), W)
    step = jnp.concatenate([step, jnp.full((Pt, 1), W, jnp.int32)], axis=1)  # [Pt, W + 1]
    way = lax.associative_scan(lambda first, then: jnp.take_along_axis(then, first, axis=1), step)[:, 0]
    found = way < W
    chosen = jnp.take_along_axis(page, jnp.minimum(way, W - 1)[:, None], axis=1)[:, 0]
    return Chain(tokens, hash_, jnp.where(found, chosen, NULL_PAGE), jnp.sum(found, dtype=jnp.int32))


def match(
    pages: Pages, rows: jax.Array, tokens: jax.Array, lengths: jax.Array, namespaces: jax.Array
) -> tuple[Pages, jax.Array]:
    """Map the longest cached prefix of each prompt into its row; what is found gains an owner before anything takes it.

    At most (length - 1) // S pages, as the last token has to be computed for its logits. With several groups, the
    longest prefix that all of them have.

    Args:
      pages: donated.
      rows: i32[C], distinct and empty, padded with R. A row that has pages gets nothing.
      tokens: i32[C, M] the prompts.
      lengths: i32[C] tokens of each.
      namespaces: i32[C], 0 <= id < (2**31 - N) / G; pages published in another namespace are not found.

    Returns:
      pages, num_matched_pages i32[C].
    """
    R, P = pages.max_rows, pages.max_pages_per_row
    empty = (rows < R) & (pages.num_pages.at[rows].get(mode="fill", fill_value=0) == 0)
    limits = jnp.where(empty, jnp.maximum(lengths - 1, 0) // pages.page_size, 0)
    find = jax.vmap(find_chain, in_axes=(None, 0, 0, 0))
    chains = jax.vmap(find, in_axes=(None, None, 0, None))(
        pages, tokens, group_namespaces(pages, namespaces), limits
    )  # [G, C, ...]
    length = jnp.min(chains.length, axis=0)
    index = jnp.arange(chains.page.shape[-1], dtype=jnp.int32)
    page = jnp.where(index[None, None, :] < length[None, :, None], chains.page, NULL_PAGE)
    row = jnp.where(empty, rows, R)
    found = page.transpose(1, 0, 2).reshape(-1)
    pages = acquire(pages, found, found != NULL_PAGE)
    return pages.replace(
        table=pages.table.at[:, row].set(jnp.pad(page, ((0, 0), (0, 0), (0, P - page.shape[-1]))), mode="drop"),
        num_pages=pages.num_pages.at[row].set(length, mode="drop"),
    ), length
