"""Decode attention in Pallas on Triton, for what `pallas_gpu.py` refuses: GPUs other than Hopper, float32, JAX 0.10.2.

It is deprecated since JAX 0.11, which works with it as long as it is there; the day it goes, so does this file. It is
never chosen by itself.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pagedjax_kernels.cache import FLOAT_DTYPES, LAYOUT_REFUSED, KVCache
from pagedjax_kernels.hardware import Hardware
from pagedjax_kernels.paged_attention.case import AttentionCase

SPLITS = 16
MIN_SPAN = 256
"""The fewest keys of a split."""

INTERPRET = False
"""Tests run the kernel without a GPU."""


def why_not_pallas_gpu_triton(hardware: Hardware, case: AttentionCase) -> str | None:
    """The reason why this backend cannot serve, or None."""
    if hardware.platform != "gpu" or hardware.compute_capability is None:
        return "for NVIDIA GPUs only"
    if hardware.compute_capability < (8, 0):
        return f"needs compute capability 8.0 or higher, this GPU has {hardware.compute_capability}"
    if case.paired or case.packed_scales:
        return LAYOUT_REFUSED
    if case.max_q_len != 1:
        return "for decode only (max_q_len=1)"
    if case.q_dtype != case.kv_dtype or case.q_dtype not in FLOAT_DTYPES:
        return f"queries and pages must be of one float type, got {case.q_dtype} and {case.kv_dtype}"
    if case.head_dim % 16 or not 16 <= case.head_dim <= 256:
        return f"the head dim must be a multiple of 16, 16 to 256, got {case.head_dim}"
    group = case.num_heads // case.num_kv_heads
    return f"at most 32 query heads per KV head, got {group}" if group > 32 else None


def _kernel(
    q_ref,
    pages_ref,
    layer_ref,
    table_ref,
    lens_ref,
    window_ref,
    acc_ref,
    top_ref,
    total_ref,
    *,
    case,
    block_n,
    precision,
):
    """One split of one row, for the heads of one KV head. Grid (K, B, SPLITS).

    Args:
      q_ref: [M, D'], the group's heads, padded with zeros to M rows and D' (a power of two) elements.
      pages_ref: [L, N, S, 2K, D]. layer_ref: i32[1]. table_ref: i32[B, P]. lens_ref: i32[B]. window_ref: i32[1].
      acc_ref: f32[M, D'], sum of the weighted values. top_ref, total_ref: f32[M], largest score and sum of weights; -inf
        and 0 where the row does not have this split.
    """
    from jax.experimental.pallas import triton as plt

    head, row, split = (pl.program_id(i) for i in range(3))
    layer, length = layer_ref[0], lens_ref[row]
    begin = jnp.where(window_ref[0] > 0, jnp.maximum(length - window_ref[0], 0), 0)
    origin = begin // block_n * block_n
    span = jnp.maximum((length - origin + SPLITS * block_n - 1) // (SPLITS * block_n) * block_n, MIN_SPAN)
    first = origin + split * span
    stop = jnp.minimum(first + span, length)
    q = q_ref[...]
    dim = lax.broadcasted_iota(jnp.int32, (block_n, q.shape[1]), 1)
    inside = dim < case.head_dim

    def body(i: Any, state: tuple) -> tuple:
        top, total, acc = state
        key = first + i * block_n + jnp.arange(block_n, dtype=jnp.int32)
        seen = (key >= begin) & (key < stop)
        page = plt.load(table_ref.at[row, key // case.page_size], mask=seen, other=0)
        where = (layer, page[:, None], (key % case.page_size)[:, None])
        mask = seen[:, None] & inside
        k, v = (plt.load(pages_ref.at[(*where, 2 * head + j, dim)], mask=mask, other=0) for j in range(2))
        scores = jnp.dot(q, k.T, preferred_element_type=jnp.float32, precision=precision) * jnp.float32(case.scale)
        if case.soft_cap is not None:
            scores = jnp.float32(case.soft_cap) * jnp.tanh(scores / jnp.float32(case.soft_cap))
        scores = jnp.where(seen[None, :], scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))  # finite: a block that is visited has a key that is seen
        shrink, weights = jnp.exp(top - new_top), jnp.exp(scores - new_top[:, None])
        products = jnp.dot(weights.astype(v.dtype), v, preferred_element_type=jnp.float32, precision=precision)
        return new_top, total * shrink + jnp.sum(weights, axis=1), acc * shrink[:, None] + products

    rows = q.shape[0]
    state = jnp.full(rows, -jnp.inf, jnp.float32), jnp.zeros(rows, jnp.float32), jnp.zeros(q.shape, jnp.float32)
    blocks = (jnp.maximum(stop - first, 0) + block_n - 1) // block_n
    top_ref[...], total_ref[...], acc_ref[...] = lax.fori_loop(0, blocks, body, state)


def paged_attention_pallas_gpu_triton(
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
    """See paged_attention; decode only. The splits are put together in plain JAX."""
    from jax.experimental.pallas import triton as plt

    rows, kv_heads, dim = case.num_rows, case.num_kv_heads, case.head_dim
    group = case.num_heads // kv_heads
    M, D = max(16, pl.next_power_of_2(group)), pl.next_power_of_2(dim)  # what a product on the tensor cores takes
    f32 = case.q_dtype == "float32"
    padded = jnp.pad(q.reshape(rows, kv_heads, group, dim), ((0, 0), (0, 0), (0, M - group), (0, D - dim)))
    shape = (rows, kv_heads, SPLITS, M)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    one = pl.BlockSpec((None, None, None, M), lambda k, b, s: (b, k, s, 0))
    acc, top, total = pl.pallas_call(
        functools.partial(
            _kernel, case=case, block_n=16 if f32 or dim > 128 else 64, precision="highest" if f32 else None
        ),
        out_shape=[jax.ShapeDtypeStruct(s, jnp.float32) for s in ((*shape, D), shape, shape)],
        grid=(kv_heads, rows, SPLITS),
        in_specs=[pl.BlockSpec((None, None, M, D), lambda k, b, s: (b, k, 0, 0)), *[whole] * 5],
        out_specs=[pl.BlockSpec((None, None, None, M, D), lambda k, b, s: (b, k, s, 0, 0)), one, one],
        compiler_params=plt.CompilerParams(num_warps=8 if f32 else 4, num_stages=2),
        interpret=INTERPRET,
        name="paged_attention_decode",
    )(
        padded,
        cache.kv_pages,
        layer.reshape(1),
        page_table,
        kv_lens,
        jnp.zeros(1, jnp.int32) if window is None else window.reshape(1),
    )
    most = jnp.max(top, axis=2, keepdims=True)  # [B, K, 1, M]
    sink = None
    if sinks is not None:
        sink = jnp.pad(sinks.astype(jnp.float32).reshape(1, kv_heads, 1, group), ((0, 0),) * 3 + ((0, M - group),))
        most = jnp.maximum(most, sink)
    most = jnp.where(jnp.isfinite(most), most, 0)
    weights = jnp.exp(top - most)
    sums = jnp.sum(total * weights, axis=2)
    if sink is not None:
        sums = sums + jnp.exp(sink - most)[:, :, 0]
    out = jnp.sum(acc * weights[..., None], axis=2) / jnp.where(sums > 0, sums, 1)[..., None]
    return out[:, :, :group, :dim].reshape(q.shape).astype(q.dtype)
