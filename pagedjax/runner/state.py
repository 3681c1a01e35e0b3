"""`EngineState`: everything that serving changes, as one pytree that each jitted program takes (donated) and gives back."""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
from flax import struct
from pagedjax_kernels import KVCache, init_cache

from pagedjax.models import ModelSpec
from pagedjax.pages import Pages, init_pages
from pagedjax.sampling import RowSampling, init_row_sampling, init_token_counts


class RowStatus(enum.IntEnum):
    """What a row is doing. Only RUNNING rows take part in a step."""

    EMPTY = 0
    RUNNING = 1
    STOPPED = 2  # met an end-of-sequence or stop id
    FULL = 3  # reached its length limit


class Rows(struct.PyTreeNode):
    """The sequences that run now, one a row.

    A row's tokens 0 .. num_computed - 1 have their keys and values in pages; tokens up to num_tokens - 1 are known. A row
    that decodes has num_computed == num_tokens - 1; one that still prefills has more to compute.
    """

    token_ids: jax.Array  # i32[R, M] prompt and generated ids
    num_tokens: jax.Array  # i32[R]
    num_computed: jax.Array  # i32[R]
    prompt_lens: jax.Array  # i32[R]
    max_tokens: jax.Array  # i32[R] total length (prompt included) at which the row is FULL
    status: jax.Array  # i32[R] RowStatus
    sampling: RowSampling
    token_counts: jax.Array  # i32[R, V] bits 0-29: times generated; bit 30: occurs in the prompt

    @property
    def max_rows(self) -> int:
        return self.token_ids.shape[0]

    @property
    def max_len(self) -> int:
        return self.token_ids.shape[1]


class EngineState(struct.PyTreeNode):
    """Pages (who owns what), the KV cache (the contents), rows (the sequences)."""

    pages: Pages
    cache: KVCache
    rows: Rows


def init_rows(max_rows: int, max_len: int, vocab_size: int) -> Rows:
    """Empty rows for sequences of at most `max_len` tokens."""

    # One buffer per field: a donated argument list may not name a buffer twice.
    def per_row() -> jax.Array:
        return jnp.zeros(max_rows, jnp.int32)

    return Rows(
        token_ids=jnp.zeros((max_rows, max_len), jnp.int32),
        num_tokens=per_row(),
        num_computed=per_row(),
        prompt_lens=per_row(),
        max_tokens=per_row(),
        status=per_row(),
        sampling=init_row_sampling(max_rows, vocab_size),
        token_counts=init_token_counts(max_rows, vocab_size),
    )


def init_state(
    spec: ModelSpec,
    *,
    num_pages: int,
    page_size: int,
    max_rows: int,
    max_len: int,
    cache_dtype: jnp.dtype,
    secret: tuple[int, int],
    hash_bits: int = 32,
    chunk_pages: int = 1,
) -> EngineState:
    """The state of an engine that has served nothing yet.

    Args:
      num_pages: physical pages N; page 0 is reserved.
      page_size: tokens in a page, S.
      max_rows: sequences at once, R.
      max_len: longest sequence in tokens, M; a row's table has ceil(M / S) logical pages.
      secret: two 32-bit words that seed the prefix hash.
      hash_bits: for tests; a short hash forces collisions.
      chunk_pages: rows grow by so many pages at a time, so that a table has room for whole chunks.
    """
    pages = init_pages(
        num_pages=num_pages,
        page_size=page_size,
        max_rows=max_rows,
        max_pages_per_row=-(-max_len // (page_size * chunk_pages)) * chunk_pages,
        num_groups=len(spec.groups.windows),
        secret=secret,
        hash_bits=hash_bits,
    )
    cache = init_cache(spec.groups.num_places, num_pages, page_size, spec.num_kv_heads, spec.head_dim, cache_dtype)
    return EngineState(pages=pages, cache=cache, rows=init_rows(max_rows, max_len, spec.vocab_size))
