"""Rows with several queries: tiles of queries of one row, each over the blocks of keys that it can see."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax_kernels import tuning
from pagedjax_kernels.cache import KVCache
from pagedjax_kernels.paged_attention import xla_softmax as softmax
from pagedjax_kernels.paged_attention.case import AttentionCase


class Tiling(NamedTuple):
    """Attributes:
    tile_queries: queries of one row in a tile.
    block_tokens: keys that a tile gathers at once.
    """

    tile_queries: int
    block_tokens: int


def prefill_tiling(case: AttentionCase) -> Tiling:
    """Measured on this device, or what fits second-level caches."""
    return tuning.configured("xla.prefill", case.shape_class, Tiling(128, 128))


def prefill(
    q: jax.Array,
    pages: tuple[KVCache, jax.Array, jax.Array],
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    window: jax.Array | None,
    sinks: jax.Array | None,
    case: AttentionCase,
) -> jax.Array:
    """q [T, K, H/K, D] -> [T, K, H/K, D]: the outputs of rows with more than one query, zeros elsewhere.

    As many tiles run as the rows need: a gather per token would read the pages T times, a batch over rows would pay
    for the longest. A tile may reach past its row's end; what lies there is put back as it was.
    """
    num_tokens, num_kv_heads, group, dim = q.shape
    tile = min(prefill_tiling(case).tile_queries, -(-num_tokens // 8) * 8)
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    tiles = jnp.where(q_lens > 1, (q_lens + tile - 1) // tile, 0)
    tile_ends = jnp.cumsum(tiles, dtype=jnp.int32)
    padded = jnp.pad(q, ((0, tile), (0, 0), (0, 0), (0, 0)))

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        row = jnp.sum(tile_ends <= i, dtype=jnp.int32)
        offset = (i - (tile_ends[row] - tiles[row])) * tile  # of the tile's first query in the row's queries
        begin = cu_q_lens[row] + offset
        here = lax.dynamic_slice(padded, (begin, 0, 0, 0), (tile, num_kv_heads, group, dim))
        position = kv_lens[row] - q_lens[row] + offset + jnp.arange(tile, dtype=jnp.int32)
        real = jnp.arange(tile, dtype=jnp.int32) < q_lens[row] - offset
        result = _tile(here, pages, row, jnp.where(real, position, -1), position[0], window, sinks, case)
        old = lax.dynamic_slice(out, (begin, 0, 0, 0), here.shape)
        return lax.dynamic_update_slice(out, jnp.where(real[:, None, None, None], result, old), (begin, 0, 0, 0))

    out = lax.fori_loop(0, tile_ends[-1], body, jnp.zeros_like(padded))
    return out[:num_tokens]


def _tile(
    q: jax.Array,
    pages: tuple[KVCache, jax.Array, jax.Array],
    row: jax.Array,
    position: jax.Array,
    first_position: jax.Array,
    window: jax.Array | None,
    sinks: jax.Array | None,
    case: AttentionCase,
) -> jax.Array:
    """q [tile, K, H/K, D] at positions i32[tile] of one row (-1: no query) -> [tile, K, H/K, D]."""
    cache, layer, page_table = pages
    tile, num_kv_heads, group, dim = q.shape
    size = cache.page_size
    block_pages = max(1, prefill_tiling(case).block_tokens // size)
    block = block_pages * size
    table = jnp.pad(page_table[row], (0, -page_table.shape[1] % block_pages))
    # 16-bit queries and pages are multiplied as they are, summed in float32; the rest is exact in float32.
    dtype = q.dtype if q.dtype.itemsize == 2 and case.kv_dtype == case.q_dtype else jnp.dtype(jnp.float32)
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    # KV heads outside, (query, group) as the rows of one matrix: K and V are read once for all queries that share them.
    rows = q.transpose(1, 0, 2, 3).reshape(num_kv_heads, tile * group, dim).astype(dtype)
    position = jnp.repeat(position, group, total_repeat_length=tile * group)
    begin = jnp.zeros_like(position) if window is None else jnp.where(window > 0, position - window + 1, 0)
    end = jnp.max(position) + 1
    lowest = jnp.zeros((), jnp.int32)  # the first key that any query sees; pages before it may be anybody's, or none
    if window is not None:
        lowest = jnp.where(window > 0, jnp.maximum(first_position - window + 1, 0), 0)

    def body(i: jax.Array, state: softmax.Softmax) -> softmax.Softmax:
        ids = lax.dynamic_slice(table, (i * block_pages,), (block_pages,))
        key = i * block + jnp.arange(block, dtype=jnp.int32)
        k, v = softmax.load_keys_and_values(cache, layer, ids, (key >= lowest) & (key < end), dtype)
        scores = jnp.einsum("kqd,ktd->kqt", rows, k, precision=precision, preferred_element_type=jnp.float32)
        seen = (key[None, :] <= position[:, None]) & (key[None, :] >= begin[:, None])
        return softmax.step(
            state,
            softmax.cap(scores * jnp.float32(case.scale), case.soft_cap),
            seen[None],
            lambda weights: jnp.einsum(
                "kqt,ktd->kqd", weights.astype(dtype), v, precision=precision, preferred_element_type=jnp.float32
            ),
        )

    first = lowest // block
    last = (end + block - 1) // block
    if sinks is not None:
        sinks = jnp.tile(sinks, (1, tile))
    state = lax.fori_loop(first, last, body, softmax.start((num_kv_heads, tile * group), dim, sinks))
    out = softmax.finish(state).reshape(num_kv_heads, tile, group, dim).transpose(1, 0, 2, 3)
    return out.astype(q.dtype)
