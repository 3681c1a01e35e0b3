"""kv_update as one scatter, for any device and, in another shape, for TPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax_kernels.cache import LANE, KVCache, slot_stride, slots_minor, to_storage
from pagedjax_kernels.kv_update.quantize import quantize


def interleave(k: jax.Array, v: jax.Array, head_dim: int) -> jax.Array:
    """[T, K, Dk] twice -> [T, 2K, D], zero-padded: head 2i is K of KV head i, head 2i+1 its V."""
    num_tokens, num_kv_heads, dim = k.shape
    kv = jnp.stack([k, v], axis=2).reshape(num_tokens, 2 * num_kv_heads, dim)
    return jnp.pad(kv, ((0, 0), (0, 0), (0, head_dim - dim))) if dim < head_dim else kv


def kv_update_xla(cache: KVCache, k: jax.Array, v: jax.Array, layer: jax.Array, slot_mapping: jax.Array) -> KVCache:
    """See kv_update. (layer, page, offset) indices, because a flat slot over all layers may not fit 32 bits."""
    return _update(cache, k, v, layer, slot_mapping, by_row=False)


def kv_update_xla_tpu(cache: KVCache, k: jax.Array, v: jax.Array, layer: jax.Array, slot_mapping: jax.Array) -> KVCache:
    """See kv_update. Where the pages have their slots inside (`slots_minor`), the rows of a slot are apart.

    A scatter whose window is all rows of a slot makes XLA bring them together first, which copies the pool; so every row
    is a window of its own there, and its number one more index.
    """
    pages = cache.kv_pages
    return _update(cache, k, v, layer, slot_mapping, by_row=slots_minor(pages.shape[3], pages.dtype))


def _update(
    cache: KVCache, k: jax.Array, v: jax.Array, layer: jax.Array, slot_mapping: jax.Array, *, by_row: bool
) -> KVCache:
    kv = interleave(k, v, cache.head_dim)
    page, offset = slot_mapping // cache.page_size, slot_mapping % cache.page_size
    index: tuple[jax.Array, ...] = (jnp.broadcast_to(layer, page.shape), page, offset)
    scales = cache.scales
    if scales is None:
        kv = kv.astype(cache.dtype)
    else:
        kv, new = quantize(kv, cache.dtype)
        scales = _put_scales(scales, cache, new, index)
    kv = to_storage(kv, cache).reshape(kv.shape[0], *cache.kv_pages.shape[3:])
    if by_row:
        index = (*(i[:, None] for i in index), jnp.arange(kv.shape[1], dtype=jnp.int32)[None])
    return cache._replace(kv_pages=cache.kv_pages.at[index].set(kv, mode="drop", unique_indices=True), scales=scales)


def _put_scales(scales: jax.Array, cache: KVCache, new: jax.Array, index: tuple[jax.Array, ...]) -> jax.Array:
    """The cache's scales with f32[T, 2K] at (layer, page, offset) i32[T] each."""
    if not cache.packed_scales:
        return scales.at[index].set(new, mode="drop", unique_indices=True)
    layer, page, offset = index
    stride = slot_stride(cache.num_kv_heads)
    place = jnp.stack([layer, page, offset * stride // LANE, offset * stride % LANE], axis=1)
    # The whole stride: one window of a row for each token.
    new = jnp.pad(new, ((0, 0), (0, stride - new.shape[1])))
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0, 1, 2), scatter_dims_to_operand_dims=(0, 1, 2, 3)
    )
    return lax.scatter(scales, place, new, numbers, unique_indices=True, mode=lax.GatherScatterMode.FILL_OR_DROP)
