"""Symmetric per-(token, head) quantisation of keys and values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pagedjax_kernels.cache import QUANTIZED_MAX


def quantize(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """[..., D] float -> ([..., D] int8 or float8_e4m3fn, f32[...] scale), with x ~ element * scale.

    The scale is max |x| / 127 (int8) or max |x| / 448 (float8_e4m3fn), so nothing overflows; an all-zero head has
    scale 0 and comes back as zeros.
    """
    dtype = jnp.dtype(dtype)
    top = QUANTIZED_MAX[dtype.name]
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / jnp.float32(top)
    inverse = jnp.where(scale > 0, 1 / jnp.where(scale > 0, scale, 1), 0)
    # The division may round a hair above the top, which int8 would wrap and e4m3fn turn into NaN.
    y = jnp.clip(x * inverse[..., None], -top, top)
    if dtype == jnp.int8:
        y = jnp.round(y)
    return y.astype(dtype), scale
