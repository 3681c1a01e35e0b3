"""Attention calls that benchmarks and the tuner make: filled pools, errors against `reference`, times."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from pagedjax_kernels import KVCache, init_cache, paged_attention
from pagedjax_kernels.paged_attention.case import AttentionCase

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}


class Model(NamedTuple):
    """Attributes: query and KV heads, their dim, tokens a page, dtypes of queries and pages (also int8, float8_e4m3fn)."""

    heads: int
    kv_heads: int
    head_dim: int
    page: int
    dtype: str
    kv_dtype: str

    def pages(self, tokens: int) -> int:
        """Pages of a row."""
        return -(-tokens // self.page)

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token in one layer, with scales."""
        scale = 4 if self.kv_dtype in ("int8", "float8_e4m3fn") else 0
        return 2 * self.kv_heads * (self.head_dim * jnp.dtype(self.kv_dtype).itemsize + scale)

    def case(self, q_lens: Sequence[int], kv_lens: Sequence[int]) -> AttentionCase:
        """The static facts of a plain call."""
        return AttentionCase(
            num_tokens=sum(q_lens),
            num_rows=len(q_lens),
            max_pages=self.pages(max(kv_lens)),
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            page_head_dim=self.head_dim,
            page_size=self.page,
            q_dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            max_q_len=1 if max(q_lens) == 1 else None,
            scale=self.head_dim**-0.5,
            soft_cap=None,
            window="none",
            sinks=False,
        )


@functools.partial(jax.jit, donate_argnums=0)
def filled(cache: KVCache) -> KVCache:
    """The cache full of numbers in [-1, 1] (times 1/100 of an int8), without random bits that would take more memory."""
    shape = cache.kv_pages.shape
    number = sum(
        jnp.float32(step) * lax.broadcasted_iota(jnp.int32, shape, axis).astype(jnp.float32)
        for axis, step in enumerate((0.7, 1.3, 0.37, 2.1, 0.9))
    )
    wave = jnp.sin(number) * (100 if cache.dtype == jnp.int8 else 1)
    pages = wave.astype(cache.dtype)
    if cache.kv_pages.dtype != cache.dtype:
        pages = lax.bitcast_convert_type(pages, cache.kv_pages.dtype)
    scales = None if cache.scales is None else jnp.full_like(cache.scales, 0.01 if cache.dtype == jnp.int8 else 1)
    return KVCache(pages, scales)


def make(model: Model, rows: int, context: int, num_layers: int) -> tuple[KVCache, jax.Array]:
    """A pool in which every row owns pages for `context` tokens, scattered; page 0 is nobody's. And the page table."""
    per_row = model.pages(context)
    N = rows * per_row + 1
    cache = filled(init_cache(num_layers, N, model.page, model.kv_heads, model.head_dim, model.kv_dtype))
    table = np.random.default_rng(0).permutation(np.arange(1, N, dtype=np.int32))
    return cache, jnp.asarray(table.reshape(rows, per_row))


def ragged(model: Model, q_lens: Sequence[int], kv_lens: Sequence[int]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Random queries, kv_lens and cu_q_lens."""
    cu = jnp.asarray(np.concatenate([[0], np.cumsum(q_lens)]), jnp.int32)
    q = jax.random.normal(jax.random.key(0), (sum(q_lens), model.heads, model.head_dim), jnp.dtype(model.dtype))
    return q, jnp.asarray(kv_lens, jnp.int32), cu


def attend(backend: str, max_q_len: int | None) -> Callable[..., jax.Array]:
    """paged_attention of one backend, compiled; a new function, so that it is traced again."""
    return jax.jit(lambda *args: paged_attention(*args, max_q_len=max_q_len, backend=backend))


def error(backend: str, model: Model, q_lens: Sequence[int], kv_lens: Sequence[int]) -> float:
    """The largest difference from `reference`; infinite where something is not finite."""
    cache, table = make(model, len(q_lens), max(kv_lens), 2)
    q, lens, cu = ragged(model, q_lens, kv_lens)
    limit = 1 if max(q_lens) == 1 else None
    got, want = (
        np.asarray(attend(b, limit)(q, cache, 1, table, lens, cu)).astype(np.float32) for b in (backend, "reference")
    )
    return float(np.max(np.abs(got - want))) if np.isfinite(got).all() else float("inf")


def best_seconds(run: Callable[[], jax.Array], repeat: int) -> float:
    """The fastest of the repeats; the first call, which compiles, is not one."""
    run().block_until_ready()
    best = float("inf")
    for _ in range(repeat):
        started = time.perf_counter()
        run().block_until_ready()
        best = min(best, time.perf_counter() - started)
    return best


def cold_layers(model: Model, tokens: int, cold_bytes: int) -> int:
    """Layers that together hold so many bytes of keys and values: taken in turns, no cache holds what is read."""
    return min(max(1, -(-cold_bytes // (tokens * model.token_bytes))), 1024)


def call_seconds(
    backend: str,
    model: Model,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    width: int,
    num_layers: int,
    steps: int,
    repeat: int,
) -> float:
    """One call, of at least `steps` in a compiled loop over the layers. width: tokens that the page table has room for."""
    cache, table = make(model, len(q_lens), max(kv_lens), num_layers)
    table = jnp.pad(table, ((0, 0), (0, model.pages(width) - table.shape[1])))
    q, lens, cu = ragged(model, q_lens, kv_lens)
    steps = max(steps, num_layers)
    limit = 1 if max(q_lens) == 1 else None

    @jax.jit
    def run(q, cache):
        def again(i, q):
            return paged_attention(q, cache, i % num_layers, table, lens, cu, max_q_len=limit, backend=backend)

        return lax.fori_loop(0, steps, again, q)

    return best_seconds(lambda: run(q, cache), repeat) / steps
