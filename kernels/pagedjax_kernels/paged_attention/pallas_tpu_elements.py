"""Page elements as the TPU kernel computes with them: out of 32-bit words and 16-bit patterns, by integer arithmetic.

Mosaic loads with a stride over sublanes in 32-bit elements only, and no float16 at all.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

WORD_ELEMENTS = {"float32": 1, "bfloat16": 2, "float16": 2, "int8": 4, "float8_e4m3fn": 4}


def computed_dtype(kv_dtype: str) -> jnp.dtype:
    """What elements are widened to: bfloat16 where it holds each of them exactly."""
    return jnp.dtype(jnp.float32 if kv_dtype in ("float32", "float16") else jnp.bfloat16)


def widened(x: jax.Array, kv_dtype: str) -> jax.Array:
    """Elements as they lie in VMEM (float16: its bits in uint16) -> float32."""
    if kv_dtype == "float16":
        return _float16(x.astype(jnp.int32))
    return x.astype(jnp.float32)


def unpacked(words: jax.Array, which: int, kv_dtype: str) -> jax.Array:
    """Element `which` of every 32-bit word u32[..], the lowest bits first -> float32."""
    bits = 32 // WORD_ELEMENTS[kv_dtype]
    up = words << (32 - bits * (which + 1))  # its bits on top
    if kv_dtype in ("float32", "bfloat16"):  # a bfloat16 is the high half of its float32
        return _bitcast(up & jnp.uint32(-(1 << (32 - bits)) & 0xFFFFFFFF), jnp.float32)
    if kv_dtype == "int8":
        return (_bitcast(up, jnp.int32) >> 24).astype(jnp.float32)
    pattern = _bitcast(up >> (32 - bits), jnp.int32)
    return _float16(pattern) if kv_dtype == "float16" else _float8(pattern)


def _float16(bits: jax.Array) -> jax.Array:
    """Patterns i32[..] of float16 -> float32. Subnormal ones by a product: a TPU flushes those of float32."""
    magnitude = bits & 0x7FFF
    exponent = jnp.where(magnitude >= 0x7C00, 0x7F800000, (127 - 15) << 23)  # infinity and NaN stay what they are
    large = _bitcast(
        jnp.where(magnitude >= 0x7C00, (magnitude << 13) | exponent, (magnitude << 13) + exponent), jnp.float32
    )
    x = jnp.where(magnitude < 0x400, magnitude.astype(jnp.float32) * jnp.float32(2**-24), large)
    return jnp.where(bits >= 0x8000, -x, x)


def _float8(bits: jax.Array) -> jax.Array:
    """Patterns i32[..] of float8_e4m3fn -> float32."""
    magnitude = bits & 0x7F
    large = _bitcast((magnitude << 20) + ((127 - 7) << 23), jnp.float32)
    x = jnp.where(magnitude < 8, magnitude.astype(jnp.float32) * jnp.float32(2**-9), large)
    x = jnp.where(magnitude == 0x7F, jnp.float32(jnp.nan), x)
    return jnp.where(bits >= 0x80, -x, x)


def _bitcast(x: jax.Array, dtype: Any) -> jax.Array:
    return lax.bitcast_convert_type(x, dtype)
