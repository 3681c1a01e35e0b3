"""Ragged attention calls over poisoned pages: everything that no row owns or has written holds NaN."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from pagedjax_kernels import KVCache, init_cache, kv_update
from pagedjax_kernels.cache import page_scales

from tests.oracles import attention_oracle

LAYER = 1  # of two; the other one stays poisoned


def poisoned(
    num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: str, platform: str | None = None
) -> KVCache:
    """A cache of two layers with NaN everywhere (in the scales, where the pages cannot hold one).

    Filled by numpy: eager jax would compile a program for every new shape.
    """
    shape = (2, num_pages, page_size, num_kv_heads, head_dim, dtype)
    like = jax.eval_shape(lambda: init_cache(*shape, platform=platform))
    scales = None if like.scales is None else jnp.asarray(np.full(like.scales.shape, np.nan, np.float32))
    pages = np.full(like.kv_pages.shape, 0 if dtype == "int8" else np.nan, jnp.dtype(dtype))
    return like._replace(kv_pages=jnp.asarray(pages.view(like.kv_pages.dtype)), scales=scales)


def contents(cache: KVCache) -> np.ndarray:
    """What the pages hold, in float64: [L, N * S, K, 2, D]."""
    x = np.asarray(cache.kv_pages).view(cache.dtype).astype(np.float64)
    x = x.reshape(x.shape[0], -1, cache.num_kv_heads, 2, cache.head_dim)  # the same order in every layout
    return x if cache.scales is None else x * np.asarray(page_scales(cache.scales, cache)).reshape(*x.shape[:-1], 1)


def as_on_a_gpu(cache: KVCache) -> KVCache:
    """On the CPU pages may be kept as unsigned integers (see compat.storage_dtype), on a GPU they never are."""
    return cache._replace(kv_pages=jnp.asarray(np.asarray(cache.kv_pages).view(cache.dtype)))


_write = jax.jit(kv_update)


@dataclasses.dataclass
class Call:
    """The arguments of one paged_attention call, and what the rows hold in float64."""

    q: jax.Array
    cache: KVCache
    page_table: jax.Array
    kv_lens: jax.Array
    cu_q_lens: jax.Array
    keys: list[np.ndarray]
    values: list[np.ndarray]

    @property
    def args(self) -> tuple:
        return self.q, self.cache, np.int32(LAYER), self.page_table, self.kv_lens, self.cu_q_lens

    def expected(self, **options) -> np.ndarray:
        """float64 [T, H, D]; zeros for padding."""
        q, cu = np.asarray(self.q).astype(np.float32), np.asarray(self.cu_q_lens)
        out = np.zeros(q.shape)
        for b, (k, v) in enumerate(zip(self.keys, self.values, strict=True)):
            if len(k):
                out[cu[b] : cu[b + 1]] = attention_oracle.attention(q[cu[b] : cu[b + 1]], k, v, **options)
        return out


def make_call(
    q_lens,
    kv_lens,
    *,
    page_size=16,
    num_kv_heads=2,
    group=3,
    head_dim=64,
    kv_dtype="float32",
    q_dtype=None,
    num_tokens=None,
    num_pages=None,
    max_pages=None,
    seed=0,
    platform=None,
) -> Call:
    """Rows of random keys and values, written with kv_update into pages scattered over the pool.

    Table entries beyond a row's length point at other rows' pages or at poison. Queries of padding tokens are NaN. The
    pages are laid out as on `platform`.
    """
    rng = np.random.default_rng(seed)
    pages = [-(-n // page_size) for n in kv_lens]
    max_pages = max_pages or max([*pages, 1]) + 1
    num_pages = num_pages or 1 + sum(pages) + 2
    cache = poisoned(num_pages, page_size, num_kv_heads, head_dim, kv_dtype, platform)
    free = list(rng.permutation(np.arange(1, num_pages)))
    table = rng.integers(0, num_pages, (len(kv_lens), max_pages)).astype(np.int32)
    slots: list[np.ndarray] = []
    for b, n in enumerate(kv_lens):
        table[b, : pages[b]] = [free.pop() for _ in range(pages[b])]
        position = np.arange(n)
        slots.append(table[b, position // page_size] * page_size + position % page_size)
    total = sum(kv_lens)
    k, v = (rng.normal(size=(total, num_kv_heads, head_dim)).astype(np.float32) for _ in range(2))
    all_slots = jnp.asarray(np.concatenate(slots).astype(np.int32))
    cache = _write(cache, jnp.asarray(k), jnp.asarray(v), np.int32(LAYER), all_slots)
    stored = contents(cache)[LAYER, ..., :head_dim]

    num_queries = sum(q_lens)
    num_tokens = num_queries + 3 if num_tokens is None else num_tokens
    q = np.full((num_tokens, num_kv_heads * group, head_dim), np.nan, np.float32)
    q[:num_queries] = rng.normal(size=(num_queries, *q.shape[1:]))
    q_dtype = q_dtype or ("float32" if cache.scales is not None else kv_dtype)
    return Call(
        q=jnp.asarray(q.astype(jnp.dtype(q_dtype))),
        cache=cache,
        page_table=jnp.asarray(table),
        kv_lens=jnp.asarray(np.asarray(kv_lens, np.int32)),
        cu_q_lens=jnp.asarray(np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)),
        keys=[stored[s, :, 0] for s in slots],
        values=[stored[s, :, 1] for s in slots],
    )
