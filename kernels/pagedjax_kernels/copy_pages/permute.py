"""Rearranging the whole pool in place, for compaction."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax_kernels.cache import KVCache, slots_minor
from pagedjax_kernels.hardware import current_hardware


def permute_pages(cache: KVCache, src: jax.Array) -> KVCache:
    """Page p of the result is page src[p] of the cache, in all layers; in place where the cache is donated.

    Follows the cycles of the permutation, so it moves only what changes its place. Page 0, which nobody owns, holds the
    page set aside meanwhile, and zeros afterwards: a page kept outside of the pool would make XLA copy the pool.

    Args:
      cache: pages [L, N, S, 2K, D].
      src: i32[N], a permutation of 0 .. N-1 with src[0] = 0.

    Raises:
      ValueError: src is not i32[N].
    """
    N = cache.num_pages
    if src.shape != (N,) or src.dtype != jnp.int32:
        raise ValueError(f"src must be i32[{N}], got {src.dtype}{list(src.shape)}")

    def move(cache: KVCache, source: jax.Array | int, target: jax.Array | int) -> KVCache:
        def one(pages: jax.Array) -> jax.Array:
            page = lax.dynamic_slice_in_dim(pages, source, 1, axis=1)
            return lax.dynamic_update_slice_in_dim(pages, page, target, axis=1)

        return jax.tree.map(one, cache)

    def along(carry):
        cache, done, at, start = carry
        return move(cache, src[at], at), done.at[at].set(True), src[at], start

    def cycle(start: jax.Array, carry):
        def turn(carry):
            cache, done, _ = carry
            carry = (move(cache, start, 0), done, start, start)
            cache, done, last, _ = lax.while_loop(lambda c: src[c[2]] != c[3], along, carry)
            return move(cache, 0, last), done.at[last].set(True), jnp.bool_(False)

        # A loop of at most one trip: a branch would copy the pool.
        cache, done = carry
        pending = ~done[start] & (src[start] != start)
        cache, done, _ = lax.while_loop(lambda c: c[2], turn, (cache, done, pending))
        return cache, done

    # On a TPU in the order that the pages lie in: nothing in these loops says it, and XLA would take another one for them.
    turned = current_hardware().platform == "tpu" and slots_minor(cache.kv_pages.shape[3], cache.kv_pages.dtype)
    cache = _turn(cache) if turned else cache
    cache, _ = lax.fori_loop(1, N, cycle, (cache, jnp.zeros(N, jnp.bool_)))
    cache = jax.tree.map(lambda pages: pages.at[:, 0].set(0), cache)
    return _turn(cache) if turned else cache


def _turn(cache: KVCache) -> KVCache:
    """Slots and rows of the pages exchanged."""
    return cache._replace(kv_pages=jnp.swapaxes(cache.kv_pages, 2, 3))
