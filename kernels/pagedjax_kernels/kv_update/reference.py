"""kv_update, one token at a time: the oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax_kernels.cache import KVCache, to_storage
from pagedjax_kernels.kv_update.quantize import quantize


def kv_update_reference(
    cache: KVCache, k: jax.Array, v: jax.Array, layer: jax.Array, slot_mapping: jax.Array
) -> KVCache:
    """See kv_update. A loop over tokens and heads with a whole select per token: obvious, and slow."""
    dim = k.shape[-1]
    for t in range(k.shape[0]):
        slot = slot_mapping[t]
        inside = (slot >= 0) & (slot < cache.num_pages * cache.page_size)
        page, offset = jnp.where(inside, slot // cache.page_size, 0), jnp.where(inside, slot % cache.page_size, 0)
        for head in range(2 * cache.num_kv_heads):
            value = (k if head % 2 == 0 else v)[t, head // 2]
            value = jnp.concatenate([value, jnp.zeros((cache.head_dim - dim,), value.dtype)])
            scales = cache.scales
            if scales is not None:
                value, scale = quantize(value, cache.dtype)
                scales = jnp.where(
                    inside,
                    lax.dynamic_update_slice(scales, scale.reshape(1, 1, 1, 1), (layer, page, offset, head)),
                    scales,
                )
            written = lax.dynamic_update_slice(
                cache.kv_pages,
                to_storage(value.astype(cache.dtype), cache).reshape(1, 1, 1, 1, -1),
                (layer, page, offset, head, 0),
            )
            cache = KVCache(jnp.where(inside, written, cache.kv_pages), scales)
    return cache
