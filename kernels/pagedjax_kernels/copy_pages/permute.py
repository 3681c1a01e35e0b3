"""Rearranging the whole pool in place, for compaction."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax_kernels.cache import KVCache


def permute_pages(cache: KVCache, src: jax.Array) -> KVCache:
    """Page p of the result is page src[p] of the cache, in all layers; in place where the cache is donated.

    Follows the cycles of the permutation with one page set aside, so it moves only what changes its place and needs no
    second pool.

    Args:
      cache: pages [L, N, S, 2K, D].
      src: i32[N], a permutation of 0 .. N-1.

    Raises:
      ValueError: src is not i32[N].
    """
    N = cache.num_pages
    if src.shape != (N,) or src.dtype != jnp.int32:
        raise ValueError(f"src must be i32[{N}], got {src.dtype}{list(src.shape)}")

    def read(cache: KVCache, page: jax.Array) -> KVCache:
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, page, 1, axis=1), cache)

    def write(cache: KVCache, page: jax.Array, content: KVCache) -> KVCache:
        return jax.tree.map(lambda x, new: lax.dynamic_update_slice_in_dim(x, new, page, axis=1), cache, content)

    def along(carry):
        cache, done, at, start = carry
        cache = write(cache, at, read(cache, src[at]))
        return cache, done.at[at].set(True), src[at], start

    def cycle(start: jax.Array, carry):
        cache, done = carry

        def turn(carry):
            cache, done, _ = carry
            # The barrier keeps the page from being read late, from an old pool kept for it.
            cache, aside = lax.optimization_barrier((cache, read(cache, start)))
            cache, done, last, _ = lax.while_loop(lambda c: src[c[2]] != c[3], along, (cache, done, start, start))
            return write(cache, last, aside), done.at[last].set(True), jnp.bool_(False)

        # A loop of at most one trip: a branch would copy the pool.
        pending = ~done[start] & (src[start] != start)
        cache, done, _ = lax.while_loop(lambda c: c[2], turn, (cache, done, pending))
        return cache, done

    cache, _ = lax.fori_loop(0, N, cycle, (cache, jnp.zeros(N, jnp.bool_)))
    return cache
