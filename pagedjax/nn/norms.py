"""Normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x [..., d] / rms(x) * weight [d], computed in float32, in x's dtype (Zhang and Sennrich, 2019).

    The normalised x is rounded to x's dtype before the weight is applied, as the published Llama checkpoints were run.
    """
    f = x.astype(jnp.float32)
    f = f * lax.rsqrt(jnp.mean(f * f, axis=-1, keepdims=True) + jnp.float32(eps))
    return f.astype(x.dtype) * jnp.broadcast_to(weight.astype(x.dtype), x.shape)


def centered_rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x [..., d] / rms(x) * (1 + weight [d]), all of it in float32, then in x's dtype: Gemma's kind."""
    f = x.astype(jnp.float32)
    f = f * lax.rsqrt(jnp.mean(f * f, axis=-1, keepdims=True) + jnp.float32(eps))
    return (f * jnp.broadcast_to(1 + weight.astype(jnp.float32), x.shape)).astype(x.dtype)
