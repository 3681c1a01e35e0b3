"""One query a row, all rows at once, over blocks of pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax_kernels.cache import KVCache
from pagedjax_kernels.paged_attention import xla_softmax as softmax
from pagedjax_kernels.paged_attention.case import AttentionCase

BLOCK_TOKENS = 64
"""Tokens of a row that are gathered at once. On CPUs a block of all rows should stay in the caches."""


def decode(
    q: jax.Array,
    pages: tuple[KVCache, jax.Array, jax.Array],
    kv_lens: jax.Array,
    window: jax.Array | None,
    sinks: jax.Array | None,
    case: AttentionCase,
) -> jax.Array:
    """q [B, K, H/K, D], kv_lens i32[B] (0: the row takes no part) -> [B, K, H/K, D] in q's dtype.

    The trip count is set by the longest row (and, with a window, the first block by the earliest one); blocks lie at
    the same places whatever the others are, so a row's result does not depend on them.
    """
    cache, layer, page_table = pages
    num_rows, num_kv_heads, group, dim = q.shape
    size = cache.page_size
    block_pages = max(1, BLOCK_TOKENS // size)
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
