"""The native ops as JAX calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax_kernels import tuning
from pagedjax_kernels.cache import KVCache

if TYPE_CHECKING:  # its package chooses among backends, this one included
    from pagedjax_kernels.paged_attention.case import AttentionCase

# What pages hold; in step with `Kind` in src/library.cc.
KINDS = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "float8_e4m3fn": 4}
WRITABLE = ("float32", "bfloat16", "float16", "int8")
ACTIVATIONS = ("float32", "bfloat16", "float16")


class Tiling(NamedTuple):
    """Attributes:
    chunk: keys that are summed up on their own, and by one thread; a multiple of 64.
    """

    chunk: int


def attention_tiling(case: AttentionCase) -> Tiling:
    """Measured on this processor, or what is enough work for a thread and leaves long rows many of them."""
    return tuning.configured("native_cpu.attention", case.shape_class, Tiling(512))


def paged_attention_native(
    q: jax.Array,
    cache: KVCache,
    layer: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    window: jax.Array | None,
    sinks: jax.Array | None,
    case: AttentionCase,
) -> jax.Array:
    """See paged_attention. Reads each page once, in place, whatever its type; sums are in float32."""
    call = jax.ffi.ffi_call(
        "pagedjax_paged_attention", jax.ShapeDtypeStruct(q.shape, q.dtype), vmap_method="sequential"
    )
    return call(
        q,
        _rows(cache),
        _or_nothing(cache.scales),
        layer,
        page_table,
        kv_lens,
        cu_q_lens,
        jnp.zeros((), jnp.int32) if window is None else window,
        _or_nothing(sinks),
        kind=np.int32(KINDS[case.kv_dtype]),
        scale=np.float32(case.scale),
        soft_cap=np.float32(case.soft_cap or 0),
        chunk=np.int32(attention_tiling(case).chunk),
    )


def kv_update_native(cache: KVCache, k: jax.Array, v: jax.Array, layer: jax.Array, slot_mapping: jax.Array) -> KVCache:
    """See kv_update."""
    scales = _or_nothing(cache.scales)
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (_rows(cache), scales)]
    call = jax.ffi.ffi_call("pagedjax_kv_update", like, input_output_aliases={4: 0, 5: 1}, vmap_method="sequential")
    kv_pages, written = call(k, v, layer, slot_mapping, _rows(cache), scales, kind=np.int32(KINDS[cache.dtype.name]))
    kv_pages = kv_pages.reshape(cache.kv_pages.shape)
    return cache._replace(kv_pages=kv_pages, scales=None if cache.scales is None else written)


def _rows(cache: KVCache) -> jax.Array:
    """The pages as [L, N, S, 2K, D]. Of pairs, too: on a CPU the same bytes, so that nothing is copied."""
    return cache.kv_pages.reshape(*cache.kv_pages.shape[:3], 2 * cache.num_kv_heads, cache.head_dim)


def _or_nothing(x: jax.Array | None) -> jax.Array:
    """An optional f32 operand; no elements where there is none."""
    return jnp.zeros((0,), jnp.float32) if x is None else x.astype(jnp.float32)
