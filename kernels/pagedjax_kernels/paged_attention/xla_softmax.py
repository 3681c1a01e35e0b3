"""The online softmax that decode and prefill share (Milakov and Gimelshein, 2018; Dao et al., 2022)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pagedjax_kernels.cache import KVCache, from_storage, page_scales

LOW = -1e30
"""Stands for minus infinity in running maxima: LOW - LOW is 0 where inf - inf is NaN."""

Softmax = tuple[jax.Array, jax.Array, jax.Array]
"""(top [..], total [..], out [.., D]), float32: the largest score so far, sum of exp(score - top), that sum over V."""


def start(shape: tuple[int, ...], dim: int, sinks: jax.Array | None) -> Softmax:
    """Nothing seen yet, but for the sinks (f32, the last axes of `shape`): a score without a value."""
    out = jnp.zeros((*shape, dim), jnp.float32)
    if sinks is None:
        return jnp.full(shape, LOW, jnp.float32), jnp.zeros(shape, jnp.float32), out
    sinks = jnp.broadcast_to(sinks, shape)
    top = jnp.maximum(sinks, LOW)
    return top, jnp.exp(sinks - top), out


def finish(state: Softmax) -> jax.Array:
    """The attention output; zeros where nothing was seen."""
    _, total, out = state
    return out / jnp.where(total > 0, total, 1)[..., None]


def cap(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def step(state: Softmax, scores: jax.Array, seen: jax.Array, add_up: Callable[[jax.Array], jax.Array]) -> Softmax:
    """Takes in one block of keys.

    Args:
      state: over [..].
      scores: f32[.., t]; what is not seen may be anything, NaN included.
      seen: bool, broadcastable to scores' shape.
      add_up: weights f32[.., t] -> f32[.., D], the weighted sum of the block's values.
    """
    top, total, out = state
    new_top = jnp.maximum(top, jnp.max(jnp.where(seen, scores, LOW), axis=-1))
    weights = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0)
    decay = jnp.exp(top - new_top)
    return new_top, total * decay + jnp.sum(weights, axis=-1), out * decay[..., None] + add_up(weights)


def load_keys_and_values(
    cache: KVCache, layer: jax.Array, ids: jax.Array, seen: jax.Array, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Gathers pages i32[.., C] of one layer, KV heads outside: K and V, [.., K, C * S, D] each, in `dtype`.

    Values of tokens that are not `seen` (bool[.., C * S]) are zeroed, because zero times NaN is NaN; keys are not, as
    their scores are masked. Indexed by (layer, page, head): slicing the layer out first would copy it,
    and a flat index may not fit 32 bits.
    """
    heads = jnp.arange(cache.num_kv_heads, dtype=jnp.int32)[:, None]
    pages = jnp.broadcast_to(ids[..., None, :], (*ids.shape[:-1], cache.num_kv_heads, ids.shape[-1]))
    length = ids.shape[-1] * cache.page_size

    def scales(all_scales: jax.Array, which: int) -> jax.Array:  # [.., K, C, S]
        if cache.packed_scales:
            x = page_scales(all_scales.at[layer, ids].get(mode="promise_in_bounds"), cache)
            return jnp.moveaxis(x[..., which::2], -1, -3)
        index = (layer, pages, slice(None), jnp.broadcast_to(2 * heads + which, pages.shape))
        return all_scales.at[index].get(mode="promise_in_bounds")

    def load(which: int) -> jax.Array:
        row = heads if cache.paired else 2 * heads + which
        index = (layer, pages, slice(None), jnp.broadcast_to(row, pages.shape))
        x = cache.kv_pages.at[index].get(mode="promise_in_bounds")  # [.., K, C, S, D], or 2D of pairs
        x = from_storage(x, cache)[..., which * cache.head_dim :] if cache.paired else from_storage(x, cache)
        x = x[..., : cache.head_dim].astype(dtype)
        if cache.scales is not None:
            x = x * scales(cache.scales, which)[..., None].astype(dtype)
        return x.reshape(*pages.shape[:-1], length, cache.head_dim)

    return load(0), jnp.where(seen[..., None, :, None], load(1), 0)
