"""The other direction of the prefix index: from a prefix to published pages that continue it, full or not.

A page is listed by the hash of what comes before it. A list has W places for all continuations of a prefix, so it holds
some of them: what is not listed any more can still be found by its own hash if it is full.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pagedjax.pages.hashing import chain_seed, finish
from pagedjax.pages.state import Pages


def root_hash(pages: Pages, namespaces: jax.Array) -> jax.Array:
    """u32: the hash of an empty prefix in namespaces i32."""
    return finish(chain_seed(namespaces.astype(jnp.uint32), pages.secret), pages.secret, pages.hash_bits)


def hash_before(pages: Pages, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For pages i32[...]: the hash u32[...] of what comes before each, and bool[...] whether that is still there."""
    N, parent = pages.total_pages, pages.parent[ids]
    is_root = parent >= N
    before = jnp.where(is_root, 0, parent)
    alive = is_root | ((parent != 0) & (pages.parent_generation[ids] == pages.generation[before]))
    return jnp.where(is_root, root_hash(pages, parent - N), pages.hash[before]), alive


def find_child(
    pages: Pages, parent: jax.Array, parent_generation: jax.Array, hash_: jax.Array, tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The listed continuation of a prefix that begins most like `tokens`.

    Args:
      parent: i32 last page of the prefix, or N + namespace.
      parent_generation: u32 its generation, 0 for a namespace.
      hash_: u32 of the prefix.
      tokens: i32[S] what is to come, NO_TOKEN behind its end.

    Returns:
      page i32, number of leading tokens that agree i32 (0: there is none).
    """
    listed = pages.children[(hash_ & (pages.children.shape[0] - 1)).astype(jnp.int32)]
    linked = (pages.parent[listed] == parent) & (pages.parent_generation[listed] == parent_generation)
    same = (pages.tokens[listed] == tokens[None, :]) & (tokens >= 0)[None, :]
    agree = jnp.where(linked, jnp.sum(jnp.cumprod(same, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32), 0)
    best = jnp.argmax(agree)
    return listed[best], agree[best]
