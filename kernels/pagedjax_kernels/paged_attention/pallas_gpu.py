"""Paged attention on NVIDIA's Hopper, in Pallas on Mosaic GPU: the plain JAX around the kernel of pallas_gpu_kernel."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pagedjax_kernels.cache import KVCache
from pagedjax_kernels.paged_attention.case import AttentionCase
from pagedjax_kernels.paged_attention.pallas_gpu_kernel import attention_kernel, scratch
from pagedjax_kernels.paged_attention.pallas_gpu_plan import LOG2_E, Plan, Tables, decode_plan, prefill_plan, span_of
from pagedjax_kernels.paged_attention.triton import tiles_of


def paged_attention_pallas_gpu(
    q: jax.Array,
    cache: KVCache,
    layer: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    window: jax.Array | None,
    sinks: jax.Array | None,
    case: AttentionCase,
    *,
    interpret: Any = None,
    min_span: int | None = None,
) -> jax.Array:
    """See paged_attention; for the cases of pallas_gpu_limits.

    Rows with one query are split along their keys; rows with more go in tiles of up to 128 rows of the products. A row's
    splits and tiles follow from its own lengths alone: batch mates do not change a bit of it.

    Args:
      interpret: plgpu.InterpretGPUParams, for tests.
      min_span: the fewest keys of a split, a multiple of 64; tests take few. None: as decode_plan has it.
    """
    scalars = jnp.stack([layer, jnp.zeros_like(layer) if window is None else window]).astype(jnp.int32)
    attend = functools.partial(_tiles, cache=cache, sinks=sinks, case=case, interpret=interpret)
    rows, plan = jnp.arange(case.num_rows, dtype=jnp.int32), decode_plan(case, min_span)
    if case.max_q_len == 1:
        tables = Tables(scalars, rows, kv_lens - 1, (kv_lens > 0).astype(jnp.int32), page_table)
        return attend(q[:, None], tables, plan=plan)[:, 0]

    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    tables = Tables(scalars, rows, kv_lens - 1, (q_lens == 1).astype(jnp.int32), page_table)
    calls = [(plan, tables, jnp.where(q_lens == 1, cu_q_lens[:-1], case.num_tokens)[:, None])]
    plan = prefill_plan(case)
    num_tiles = plan.most_tiles(case)
    if num_tiles > 0:
        row, start = tiles_of(q_lens, plan.queries, num_tiles)
        used, row = row < case.num_rows, jnp.minimum(row, case.num_rows - 1)
        count = jnp.where(used, jnp.minimum(q_lens[row] - start, plan.queries), 0)
        within = jnp.arange(plan.queries, dtype=jnp.int32)[None]
        first = (cu_q_lens[row] + start)[:, None]
        tables = Tables(scalars, row, kv_lens[row] - q_lens[row] + start, count, page_table)
        calls.append((plan, tables, jnp.where(within < count[:, None], first + within, case.num_tokens)))

    out = jnp.zeros_like(q)
    for plan, tables, token in calls:
        # Queries of padding may be NaN; places without a query are filled with zeros.
        tiles = attend(q.at[token].get(mode="fill", fill_value=0), tables, plan=plan)
        out = out.at[token].set(tiles, mode="drop")
    return out


def _tiles(
    q: jax.Array,
    tables: Tables,
    *,
    cache: KVCache,
    sinks: jax.Array | None,
    plan: Plan,
    case: AttentionCase,
    interpret: Any,
) -> jax.Array:
    """q [tiles, queries, H, D] -> the same in q's dtype; zeros for tiles not in use."""
    num_tiles, queries, num_heads, dim = q.shape
    heads, used = plan.heads, queries * plan.group
    x = q.reshape(num_tiles, queries, heads, plan.group, dim).transpose(0, 2, 1, 3, 4)
    x = x.reshape(num_tiles, heads, used, dim)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, plan.warpgroups * plan.rows - used), (0, plan.width - dim)))
    x = x.reshape(num_tiles, heads, plan.warpgroups, plan.rows, plan.width)
    pages = (cache.num_layers, cache.num_pages * plan.parts, plan.page, 2 * heads, plan.width)
    pool = cache.kv_pages.reshape(pages)  # the same order of elements: nothing is copied
    shape = (num_tiles, heads, plan.splits, plan.warpgroups)
    acc, sums = plgpu.kernel(
        functools.partial(attention_kernel, plan=plan),
        out_type=[
            jax.ShapeDtypeStruct((*shape, plan.rows, plan.width), jnp.float32),
            jax.ShapeDtypeStruct((*shape, 2, plan.rows), jnp.float32),
        ],
        scratch_types=scratch(plan, q.dtype),
        grid=(heads, num_tiles, plan.splits),
        grid_names=("head", "tile", "split"),
        num_threads=plan.warpgroups + 1,
        thread_name="thread",
        kernel_name="paged_attention_decode" if queries == 1 else "paged_attention_prefill",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )(*tables, x, pool)
    out = _reduce(acc, sums, tables, sinks, plan)[:, :, :used, :dim].astype(q.dtype)
    out = out.reshape(num_tiles, heads, queries, plan.group, dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(num_tiles, queries, num_heads, dim)


def _reduce(acc: jax.Array, sums: jax.Array, tables: Tables, sinks: jax.Array | None, plan: Plan) -> jax.Array:
    """The splits put together, what the kernel wrote -> f32[tiles, K, warpgroups * rows, D]; zeros where no key is seen."""
    span = span_of(tables.first, tables.count, tables.scalars[1], plan)
    rows = plan.warpgroups * plan.rows
    real = [(span.origin + s * span.size < span.end)[:, None, None] for s in range(plan.splits)]
    tops, totals = (
        [jnp.where(is_real, sums[:, :, s, :, i].reshape(-1, plan.heads, rows), none) for s, is_real in enumerate(real)]
        for i, none in enumerate((-jnp.inf, 0.0))
    )
    top = functools.reduce(jnp.maximum, tops)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, plan.heads, plan.group) * LOG2_E
        sink = sink[:, :, jnp.arange(rows) % plan.group]
        top = jnp.maximum(top, sink)
    top = jnp.where(top == -jnp.inf, 0, top)
    # One after the other, and absent ones add zero: the order of a sum hangs on nothing but the row.
    total = jnp.zeros_like(top) if sinks is None else jnp.exp2(sink - top)
    out = jnp.zeros((*top.shape, plan.width), jnp.float32)
    for s, is_real in enumerate(real):
        weight = jnp.exp2(tops[s] - top)
        total = total + totals[s] * weight
        out = out + jnp.where(is_real[..., None], acc[:, :, s].reshape(out.shape), 0) * weight[..., None]
    return out / jnp.where(total > 0, total, 1)[..., None]
