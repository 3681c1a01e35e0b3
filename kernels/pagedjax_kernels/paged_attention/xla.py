"""Paged attention in plain JAX: block-wise online softmax in float32, for any device. Never a [B, P * S, ...] copy."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pagedjax_kernels.cache import KVCache
from pagedjax_kernels.paged_attention.case import AttentionCase
from pagedjax_kernels.paged_attention.xla_decode import decode
from pagedjax_kernels.paged_attention.xla_prefill import prefill


def paged_attention_xla(
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
    """See paged_attention.

    Rows with one query go through `decode`, all of them at once; rows with more through `prefill`, tile after tile.
    Both loops have dynamic trip counts, so a step without rows of one kind pays next to nothing for it.
    """
    num_tokens, num_heads, dim = q.shape
    if dim < cache.head_dim:
        q = jnp.pad(q, ((0, 0), (0, 0), (0, cache.head_dim - dim)))
    group = num_heads // cache.num_kv_heads
    q = q.reshape(num_tokens, cache.num_kv_heads, group, cache.head_dim)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(cache.num_kv_heads, group)
    pages = (cache, layer, page_table)

    if case.max_q_len == 1:
        out = decode(q, pages, kv_lens, window, sinks, case)
    else:
        q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
        single = q_lens == 1
        first = jnp.minimum(cu_q_lens[:-1], num_tokens - 1)
        out = prefill(q, pages, kv_lens, cu_q_lens, window, sinks, case)
        rows = decode(q[first], pages, jnp.where(single, kv_lens, 0), window, sinks, case)
        out = out.at[jnp.where(single, first, num_tokens)].set(rows, mode="drop")
    return out.reshape(num_tokens, num_heads, cache.head_dim)[..., :dim]
