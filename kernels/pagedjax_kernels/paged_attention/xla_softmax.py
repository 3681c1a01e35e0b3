"""The online softmax that decode and prefill share (Milakov and Gimelshein, 2018; Dao et al., 2022)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pagedjax_kernels.cache import KVCache

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


def load_pages(cache: KVCache, layer: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Gathers pages ids[...] of one layer: ([..., S, 2K, D] as stored, f32[..., S, 2K] scales or None).

    Indexed by (layer, page): slicing the layer out first would copy it, and a flat index may not fit 32 bits.
    """
    layers = jnp.broadcast_to(layer, ids.shape)
    kv = cache.kv_pages.at[layers, ids].get(mode="promise_in_bounds")
    return kv, None if cache.scales is None else cache.scales.at[layers, ids].get(mode="promise_in_bounds")
