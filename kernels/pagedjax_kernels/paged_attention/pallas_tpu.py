"""Paged attention on TPUs, in Pallas: the plain JAX around the kernel of pallas_tpu_kernel.

Rows with one query go through one call of the kernel with tiles of one query, rows with more through another one with
larger tiles. Both have a static grid that holds the most tiles there can be; programs without a tile do nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pagedjax_kernels.cache import KVCache, from_storage, slot_stride, slots_minor
from pagedjax_kernels.paged_attention.case import AttentionCase
from pagedjax_kernels.paged_attention.pallas_tpu_kernel import LANES, Plan, Tables, attention_kernel

_BLOCK_TOKENS = 512
_BLOCK_BYTES = 4 * 2**20  # of VMEM for both blocks: with the rest under the 16 MiB that a kernel gets by default
_TILE_ROWS = 256
_TILE_BYTES = 2**19  # of queries; with the outputs, the state in float32 and what is double-buffered a tenfold


def pool_view(pages: jax.Array) -> tuple[jax.Array, bool]:
    """The pages as XLA lays them out on a TPU, so that the kernel reads them where they are: no copy of the pool.

    Args:
      pages: [L, N, S, 2K, D], or [L, N, S, K, 128] in pairs.

    Returns:
      (view, slots_minor): the pages with the slots inside, [L, N, 2K or K, S, W], where they lie like that.
    """
    minor = slots_minor(pages.shape[3], pages.dtype)
    return jnp.swapaxes(pages, 2, 3) if minor else pages, minor


def paged_attention_pallas_tpu(
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
    interpret: Any = False,
    block_tokens: int | None = None,
    tile_queries: int | None = None,
) -> jax.Array:
    """See paged_attention.

    Args:
      interpret: pltpu.InterpretParams to run it anywhere, slowly.
      block_tokens: most keys that are computed at a time; None: as many as fit.
      tile_queries: most queries of a tile; None: as many as fit.
    """
    num_tokens, num_heads, dim = q.shape
    dtype = q.dtype
    if dtype == jnp.float16:  # the kernel has no such elements
        q = q.astype(jnp.float32)
    pool, minor = pool_view(from_storage(cache.kv_pages, cache))
    # Where there are none, something that is not read.
    scales = jnp.zeros((1, 1, 1, LANES), jnp.float32) if cache.scales is None else cache.scales
    group, width = num_heads // cache.num_kv_heads, pool.shape[-1]
    q = jnp.pad(q, ((0, 0), (0, 0), (0, width - dim))).reshape(num_tokens, cache.num_kv_heads, group, width)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(cache.num_kv_heads, 1, group)
    run = functools.partial(_tiles, q, (pool, scales), layer, page_table, kv_lens, window, sinks, interpret=interpret)
    plan = Plan(
        queries=1,
        group=group,
        heads=cache.num_kv_heads,
        page_size=cache.page_size,
        max_pages=page_table.shape[1],
        block_pages=_block_pages(pool, page_table.shape[1], cache.page_size, block_tokens),
        paired=cache.paired,
        slots_minor=minor,
        kv_dtype=case.kv_dtype,
        stride=0 if cache.scales is None else slot_stride(cache.num_kv_heads),
        scale=case.scale,
        soft_cap=case.soft_cap,
        window=window is not None,
        sinks=sinks is not None,
        interpret=bool(interpret),
    )

    if case.max_q_len == 1:
        starts = jnp.arange(num_tokens, dtype=jnp.int32)
        out = run(starts, (kv_lens > 0).astype(jnp.int32), plan=plan)
    else:
        starts, q_lens = cu_q_lens[:-1], jnp.where(kv_lens > 0, cu_q_lens[1:] - cu_q_lens[:-1], 0)
        out = run(starts, jnp.where(q_lens == 1, 1, 0), plan=plan)
        if num_tokens > 1:
            token_bytes = num_heads * width * q.dtype.itemsize
            queries = tile_queries or max(1, min(_TILE_ROWS // group, _TILE_BYTES // token_bytes))
            queries = min(queries, case.max_q_len or num_tokens, num_tokens)
            # Each token is in the output of one of the two at most, and zero in the other.
            out += run(starts, jnp.where(q_lens > 1, q_lens, 0), plan=plan._replace(queries=queries))
    out = out[..., width // 2 :] if cache.paired else out
    return out.reshape(num_tokens, num_heads, -1)[..., :dim].astype(dtype)


def _block_pages(pool: jax.Array, max_pages: int, page_size: int, block_tokens: int | None) -> int:
    """Pages of a block: up to block_tokens, in the memory that there is for two of them."""
    page_bytes = pool.dtype.itemsize * pool.shape[2] * pool.shape[3] * pool.shape[4]
    pages = min((block_tokens or _BLOCK_TOKENS) // page_size, _BLOCK_BYTES // (2 * page_bytes), max_pages)
    return max(pages, 1)


def _tiles(
    q: jax.Array,
    pages: tuple[jax.Array, jax.Array],
    layer: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    window: jax.Array | None,
    sinks: jax.Array | None,
    starts: jax.Array,
    q_lens: jax.Array,
    *,
    plan: Plan,
    interpret: Any,
) -> jax.Array:
    """Attention of the rows with q_lens > 0, whose queries begin at `starts`: [T, K, G, W], zero for other tokens."""
    num_tokens, heads, group, width = q.shape
    num_rows, queries = q_lens.shape[0], plan.queries
    # A row fills all of its tiles but the last one.
    most = min(num_rows, num_tokens) if queries == 1 else num_tokens // queries + min(num_rows, num_tokens // 2)
    per_row = -(-q_lens // queries)
    stops = jnp.cumsum(per_row).astype(jnp.int32)
    tile = jnp.arange(most, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(stops, tile, side="right"), num_rows - 1).astype(jnp.int32)
    offset = (tile - (stops - per_row)[row]) * queries  # of the tile's first query among its row's
    first = kv_lens[row] - q_lens[row] + offset
    tables = Tables(
        scalars=jnp.stack([stops[-1], layer, jnp.int32(0) if window is None else window]).astype(jnp.int32),
        row=row,
        first=first,
        end=jnp.minimum(first + queries, kv_lens[row]),
        pages=page_table.reshape(-1),
    )

    within = offset[:, None] + jnp.arange(queries, dtype=jnp.int32)[None]  # [tiles, queries]
    used = (tile < stops[-1])[:, None] & (within < q_lens[row][:, None])
    token = jnp.where(used, starts[row][:, None] + within, num_tokens)
    tiles = q.at[token].get(mode="fill", fill_value=0)  # queries of padding may be NaN
    tiles = tiles.transpose(0, 2, 1, 3, 4).reshape(most, heads, queries * group, width)
    tiles = jnp.pad(tiles, ((0, 0), (0, 0), (0, plan.rows - queries * group), (0, 0)))
    out = _call(tables, tiles, _sink_rows(sinks, plan), pages, plan, interpret)
    out = out[:, :, : queries * group].reshape(most, heads, queries, group, width).transpose(0, 2, 1, 3, 4)
    return jnp.zeros_like(q).at[token].set(out, mode="drop")


def _sink_rows(sinks: jax.Array | None, plan: Plan) -> jax.Array:
    """f32[K, 1, G] -> f32[K, rows, 1], one for each row of the matmuls."""
    if sinks is None:
        return jnp.zeros((plan.heads, plan.rows, 1), jnp.float32)
    rows = jnp.broadcast_to(sinks, (plan.heads, plan.queries, plan.group)).reshape(plan.heads, -1, 1)
    return jnp.pad(rows, ((0, 0), (0, plan.rows - rows.shape[1]), (0, 0)))


def _call(
    tables: Tables,
    tiles: jax.Array,
    sinks: jax.Array,
    pages: tuple[jax.Array, jax.Array],
    plan: Plan,
    interpret: Any,
) -> jax.Array:
    """The kernel on tiles [tiles, K, rows, W]; those that are not in use come back with anything in them."""
    pool, scales = pages
    num_tiles, heads, rows, width = tiles.shape

    def tile_block(tile: jax.Array, scalars: Any, *_: Any) -> tuple:
        # Programs without a tile stay at the last one's block: nothing is copied for them.
        return jnp.minimum(tile, jnp.maximum(scalars[0] - 1, 0)), 0, 0, 0

    block = pl.BlockSpec((1, heads, rows, width), tile_block)
    buffer: tuple[int, ...]
    if plan.slots_minor:
        buffer = (2, pool.shape[2], plan.block_tokens, width)
    else:
        buffer = (2, width // LANES, plan.block_tokens, pool.shape[3], LANES)
    state = pltpu.VMEM((heads, rows, LANES), jnp.float32)
    call = pl.pallas_call(
        functools.partial(attention_kernel, plan=plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=(num_tiles,),
            in_specs=[
                block,
                pl.BlockSpec(sinks.shape, lambda *_: (0, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=block,
            scratch_shapes=[
                pltpu.VMEM(buffer, pool.dtype),
                pltpu.VMEM((2, plan.block_pages if plan.stride else 1, *scales.shape[2:]), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SMEM((1,), jnp.int32),
                state,
                state,
                pltpu.VMEM((heads, rows, width), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(tiles.shape, tiles.dtype),
        # Programs follow one another: each starts the copies of the next one's first block.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="paged_attention_decode" if plan.queries == 1 else "paged_attention_prefill",
    )
    return call(*tables, tiles, sinks, pool, scales)
