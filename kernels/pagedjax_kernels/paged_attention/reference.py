"""Dense attention in float32, one obvious formula: the oracle for every other backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pagedjax_kernels.cache import KVCache, from_storage, page_scales
from pagedjax_kernels.paged_attention.case import AttentionCase


def paged_attention_reference(
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
    """See paged_attention. Copies every token's whole row out of the pages: O(T * P * S) memory."""
    num_tokens, num_heads, dim = q.shape
    num_rows, max_pages = page_table.shape
    num_kv_heads, length = cache.num_kv_heads, max_pages * cache.page_size

    kv = from_storage(cache.kv_pages[layer][page_table], cache).astype(jnp.float32)
    kv = kv.reshape(*kv.shape[:3], 2 * num_kv_heads, cache.head_dim)  # [B, P, S, 2K, D], of pairs, too
    if cache.scales is not None:
        kv = kv * page_scales(cache.scales[layer][page_table], cache)[..., None]
    kv = kv.reshape(num_rows, length, num_kv_heads, 2, cache.head_dim)[..., :dim]

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = (
        jnp.searchsorted(cu_q_lens, token, side="right").astype(jnp.int32) - 1
    )  # the last row that starts at or before
    real = token < cu_q_lens[num_rows]
    row = jnp.clip(row, 0, num_rows - 1)
    position = kv_lens[row] - cu_q_lens[row + 1] + token  # the queries are the row's last tokens

    key = jnp.arange(length, dtype=jnp.int32)[None, :]
    visible = real[:, None] & (key <= position[:, None]) & (key < kv_lens[row][:, None])  # [T, P*S]
    if window is not None:
        visible &= (window <= 0) | (key > position[:, None] - window)

    group = num_heads // num_kv_heads
    qf = q.astype(jnp.float32).reshape(num_tokens, num_kv_heads, group, dim)
    k = jnp.where(visible[:, :, None, None], kv[row, :, :, 0], 0)  # [T, P*S, K, D]; what is hidden may be NaN
    v = jnp.where(visible[:, :, None, None], kv[row, :, :, 1], 0)
    scores = jnp.einsum("tkgd,tskd->tkgs", qf, k, precision="highest") * jnp.float32(case.scale)
    if case.soft_cap is not None:
        scores = jnp.float32(case.soft_cap) * jnp.tanh(scores / jnp.float32(case.soft_cap))
    scores = jnp.where(visible[:, None, None, :], scores, -jnp.inf)

    top = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, num_kv_heads, group, 1)
        top = jnp.maximum(top, sink)
    top = jnp.where(jnp.isfinite(top), top, 0)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - top)
    weights = weights / jnp.where(total > 0, total, 1)
    out = jnp.einsum("tkgs,tskd->tkgd", weights, v, precision="highest")
    return out.reshape(num_tokens, num_heads, dim).astype(q.dtype)
