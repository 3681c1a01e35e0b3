"""copy_pages as a loop over the copies that are really there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax_kernels.cache import KVCache


def copy_pages_xla(cache: KVCache, src: jax.Array, dst: jax.Array) -> KVCache:
    """See copy_pages.

    The trip count is the number of copies: a decode step asks for a fixed width of copies on every step and nearly
    always for none. A page is moved by slices and not by a scatter, which also spares the scatter's conversion of the
    whole pool where bfloat16 scatters are not in place.
    """
    count = src.shape[0]
    if count == 0:
        return cache
    valid = dst < cache.num_pages
    num_copies = jnp.sum(valid, dtype=jnp.int32)
    # Copies to the front, in order; padding goes behind the end.
    to = jnp.where(valid, jnp.cumsum(valid, dtype=jnp.int32) - 1, count)
    order = jnp.zeros(count, jnp.int32).at[to].set(jnp.arange(count, dtype=jnp.int32), mode="drop")

    def move(pages: jax.Array, i: jax.Array) -> jax.Array:
        zeros = (0,) * (pages.ndim - 2)
        shape = (pages.shape[0], 1, *pages.shape[2:])
        page = lax.dynamic_slice(pages, (0, src[order[i]], *zeros), shape)
        return lax.dynamic_update_slice(pages, page, (0, dst[order[i]], *zeros))

    return lax.fori_loop(0, num_copies, lambda i, cache: jax.tree.map(lambda pages: move(pages, i), cache), cache)
