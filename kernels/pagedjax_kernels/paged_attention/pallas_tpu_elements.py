"""Page elements as the TPU kernel computes with them, out of 32-bit words: Mosaic loads with a stride over sublanes in
32-bit elements only."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

WORD_ELEMENTS = {"float32": 1, "bfloat16": 2, "int8": 4, "float8_e4m3fn": 4}
"""Elements of a 32-bit word; float16 is none of Mosaic's types."""


def computed_dtype(kv_dtype: str) -> jnp.dtype:
    """What elements are widened to: bfloat16 holds each int8 and float8 exactly."""
    return jnp.dtype(jnp.float32 if kv_dtype == "float32" else jnp.bfloat16)


def unpacked(words: jax.Array, which: int, kv_dtype: str) -> jax.Array:
    """Element `which` of every word u32[..], the lowest bits first -> float32."""
    bits = 32 // WORD_ELEMENTS[kv_dtype]
    up = words << (32 - bits * (which + 1))  # its bits on top
    if kv_dtype == "bfloat16":  # the high half of its float32
        return lax.bitcast_convert_type(up & jnp.uint32(0xFFFF0000), jnp.float32)
    if kv_dtype == "int8":
        return (lax.bitcast_convert_type(up, jnp.int32) >> 24).astype(jnp.float32)
    return _float8(lax.bitcast_convert_type(up >> 24, jnp.int32))


def _float8(bits: jax.Array) -> jax.Array:
    """Patterns i32[..] of float8_e4m3fn -> float32. Subnormal ones by a product: a TPU flushes those of float32."""
    magnitude = bits & 0x7F
    large = lax.bitcast_convert_type((magnitude << 20) + ((127 - 7) << 23), jnp.float32)
    x = jnp.where(magnitude < 8, magnitude.astype(jnp.float32) * jnp.float32(2**-9), large)
    x = jnp.where(magnitude == 0x7F, jnp.float32(jnp.nan), x)
    return jnp.where(bits >= 0x80, -x, x)
