"""One query a row, all rows at once, over blocks of pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax_kernels.cache import KVCache
from pagedjax_kernels.paged_attention import xla_softmax as softmax
from pagedjax_kernels.paged_attention.case import AttentionCase

BLOCK_TOKENS = 128
"""Tokens of a row that are gathered at once."""


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
        top, total, out = state
        ids = lax.dynamic_slice(table, (0, i * block_pages), (num_rows, block_pages))
        kv, scales = softmax.load_pages(cache, layer, ids)
        kv = kv.reshape(num_rows, block, num_kv_heads, 2, dim)
        key = i * block + jnp.arange(block, dtype=jnp.int32)[None, :]
        seen = (key <= position[:, None]) & (key >= begin[:, None])
        kv = jnp.where(seen[:, :, None, None, None], kv.astype(jnp.float32), 0)
        if scales is not None:
            scales = jnp.where(seen[:, :, None, None], scales.reshape(num_rows, block, num_kv_heads, 2), 0)
            kv = kv * scales[..., None]
        scores = jnp.einsum("bkgd,btkd->bkgt", qf, kv[:, :, :, 0], precision="highest")
        scores = jnp.where(seen[:, None, None, :], softmax.cap(scores, case.soft_cap), softmax.LOW)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.where(seen[:, None, None, :], jnp.exp(scores - new_top[..., None]), 0)
        decay = jnp.exp(top - new_top)
        total = total * decay + jnp.sum(weights, axis=-1)
        out = out * decay[..., None] + jnp.einsum("bkgt,btkd->bkgd", weights, kv[:, :, :, 1], precision="highest")
        return new_top, total, out

    # An empty row has nothing to read, so it may not hold the first block back.
    first = jnp.min(jnp.where(kv_lens > 0, begin, jnp.iinfo(jnp.int32).max)) // block
    last = (jnp.max(kv_lens) + block - 1) // block
    state = lax.fori_loop(first, last, body, softmax.start((num_rows, num_kv_heads, group), dim, sinks))
    out = jnp.where((kv_lens > 0)[:, None, None, None], softmax.finish(state), 0)
    return out.astype(q.dtype)
