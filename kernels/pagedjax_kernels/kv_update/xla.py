"""kv_update as one scatter."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pagedjax_kernels.cache import KVCache, to_storage
from pagedjax_kernels.kv_update.quantize import quantize


def interleave(k: jax.Array, v: jax.Array, head_dim: int) -> jax.Array:
    """[T, K, Dk] twice -> [T, 2K, D], zero-padded: head 2i is K of KV head i, head 2i+1 its V."""
    num_tokens, num_kv_heads, dim = k.shape
    kv = jnp.stack([k, v], axis=2).reshape(num_tokens, 2 * num_kv_heads, dim)
    return jnp.pad(kv, ((0, 0), (0, 0), (0, head_dim - dim))) if dim < head_dim else kv


def kv_update_xla(cache: KVCache, k: jax.Array, v: jax.Array, layer: jax.Array, slot_mapping: jax.Array) -> KVCache:
    """See kv_update. (layer, page, offset) indices, because a flat slot over all layers may not fit 32 bits."""
    kv = interleave(k, v, cache.head_dim)
    pages, offsets = slot_mapping // cache.page_size, slot_mapping % cache.page_size
    index = (jnp.broadcast_to(layer, pages.shape), pages, offsets)
    if cache.scales is None:
        kv, scales = kv.astype(cache.dtype), None
    else:
        kv, new_scales = quantize(kv, cache.dtype)
        scales = cache.scales.at[index].set(new_scales, mode="drop", unique_indices=True)
    return KVCache(cache.kv_pages.at[index].set(to_storage(kv, cache), mode="drop", unique_indices=True), scales)
