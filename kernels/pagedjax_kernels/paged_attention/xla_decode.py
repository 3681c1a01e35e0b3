"""One query a row: groups of rows, each over blocks of pages."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax_kernels import tuning
from pagedjax_kernels.cache import KVCache
from pagedjax_kernels.hardware import current_hardware
from pagedjax_kernels.paged_attention import xla_softmax as softmax
from pagedjax_kernels.paged_attention.case import AttentionCase


class Tiling(NamedTuple):
    """Attributes:
    rows: rows that go through a loop of their own.
    block_tokens: tokens of each of them that are gathered at once.
    """

    rows: int
    block_tokens: int


# CPUs: what is gathered should stay in the second-level cache, and few rows should wait for the longest of their group.
# Elsewhere a loop's step is a launch: as few and as large as memory allows. Independent of the number of rows, so that a
# row is computed alike in every batch.
TILINGS = {"cpu": Tiling(8, 64), "gpu": Tiling(256, 256), "tpu": Tiling(256, 256)}


def decode_tiling(case: AttentionCase) -> Tiling:
    """Measured on this device, or what TILINGS says."""
    default = TILINGS.get(current_hardware().platform, TILINGS["gpu"])
    return tuning.configured("xla.decode", case.shape_class, default)


def decode(
    q: jax.Array,
    pages: tuple[KVCache, jax.Array, jax.Array],
    kv_lens: jax.Array,
    window: jax.Array | None,
    sinks: jax.Array | None,
    case: AttentionCase,
) -> jax.Array:
    """q [B, K, H/K, D], kv_lens i32[B] (0: the row takes no part) -> [B, K, H/K, D] in q's dtype.

    Rows are taken in groups of about equal lengths, because a group runs as long as its longest row.
    """
    cache, layer, page_table = pages
    num_rows = q.shape[0]
    tiling = decode_tiling(case)
    if num_rows <= tiling.rows:
        return _group(q, (cache, layer, page_table), kv_lens, window, sinks, case, tiling)
    # Longest first; what fills the last group up is no row at all: length 0, and its result is dropped.
    order = jnp.argsort(-kv_lens).astype(jnp.int32)
    padding = -num_rows % tiling.rows
    order = jnp.concatenate([order, jnp.full(padding, num_rows, jnp.int32)]).reshape(-1, tiling.rows)

    def group(rows: jax.Array) -> jax.Array:
        lens = kv_lens.at[rows].get(mode="fill", fill_value=0)
        table = page_table.at[rows].get(mode="clip")
        return _group(q.at[rows].get(mode="clip"), (cache, layer, table), lens, window, sinks, case, tiling)

    out = lax.map(group, order)
    return jnp.zeros_like(q).at[order.reshape(-1)].set(out.reshape(-1, *q.shape[1:]), mode="drop")


def _group(
    q: jax.Array,
    pages: tuple[KVCache, jax.Array, jax.Array],
    kv_lens: jax.Array,
    window: jax.Array | None,
    sinks: jax.Array | None,
    case: AttentionCase,
    tiling: Tiling,
) -> jax.Array:
    """`decode` of rows that run together: as many blocks as the longest needs, from the first that a window lets see.

    Blocks lie at the same places whatever the rows are, and one that a row does not see leaves it bit for bit as it was.
    """
    cache, layer, page_table = pages
    num_rows, num_kv_heads, group, dim = q.shape
    size = cache.page_size
    block_pages = max(1, tiling.block_tokens // size)
    block = block_pages * size
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % block_pages)))
    qf = q.astype(jnp.float32) * jnp.float32(case.scale)
    position = kv_lens - 1
    begin = jnp.zeros_like(kv_lens)
    if window is not None:
        begin = jnp.where(window > 0, jnp.maximum(kv_lens - window, 0), 0)

    def body(i: jax.Array, state: softmax.Softmax) -> softmax.Softmax:
        ids = lax.dynamic_slice(table, (0, i * block_pages), (num_rows, block_pages))
        key = i * block + jnp.arange(block, dtype=jnp.int32)[None, :]
        seen = (key <= position[:, None]) & (key >= begin[:, None])  # [B, t]
        k, v = softmax.load_keys_and_values(cache, layer, ids, seen, jnp.float32)
        scores = jnp.einsum("bkgd,bktd->bkgt", qf, k, precision="highest")
        return softmax.step(
            state,
            softmax.cap(scores, case.soft_cap),
            seen[:, None, None, :],
            lambda weights: jnp.einsum("bkgt,bktd->bkgd", weights, v, precision="highest"),
        )

    # An empty row has nothing to read, so it may not hold the first block back.
    first = jnp.min(jnp.where(kv_lens > 0, begin, jnp.iinfo(jnp.int32).max)) // block
    last = (jnp.max(kv_lens) + block - 1) // block
    state = lax.fori_loop(first, last, body, softmax.start((num_rows, num_kv_heads, group), dim, sinks))
    out = jnp.where((kv_lens > 0)[:, None, None, None], softmax.finish(state), 0)
    return out.astype(q.dtype)
