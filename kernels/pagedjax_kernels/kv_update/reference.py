"""kv_update, one token at a time: the oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax_kernels.cache import LANE, KVCache, slot_stride, to_storage
from pagedjax_kernels.kv_update.quantize import quantize


def kv_update_reference(
    cache: KVCache, k: jax.Array, v: jax.Array, layer: jax.Array, slot_mapping: jax.Array
) -> KVCache:
    """See kv_update. A whole select per token: obvious, and slow."""
    num_tokens, num_kv_heads, dim = k.shape
    size = cache.page_size
    kv = jnp.zeros((num_tokens, 2 * num_kv_heads, cache.head_dim), k.dtype)
    kv = kv.at[:, 0::2, :dim].set(k).at[:, 1::2, :dim].set(v)

    def put(t: jax.Array, cache: KVCache) -> KVCache:
        slot = slot_mapping[t]
        inside = (slot >= 0) & (slot < cache.num_pages * size)
        page, offset = jnp.where(inside, slot // size, 0), jnp.where(inside, slot % size, 0)
        token, scales = kv[t], cache.scales
        if scales is not None:
            token, scale = quantize(token, cache.dtype)
            row, lane = offset, jnp.zeros_like(offset)
            if cache.packed_scales:
                stride = slot_stride(num_kv_heads)
                row, lane = offset * stride // LANE, offset * stride % LANE
            written = lax.dynamic_update_slice(scales, scale[None, None, None], (layer, page, row, lane))
            scales = jnp.where(inside, written, scales)
        token = to_storage(token.astype(cache.dtype), cache).reshape(cache.kv_pages.shape[3:])
        written = lax.dynamic_update_slice(cache.kv_pages, token[None, None, None], (layer, page, offset, 0, 0))
        return cache._replace(kv_pages=jnp.where(inside, written, cache.kv_pages), scales=scales)

    return lax.fori_loop(0, num_tokens, put, cache)
