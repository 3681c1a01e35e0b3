"""One forward pass over ragged tokens: take pages, run the model, sample, append. Pure; jitted by `programs`.

Lanes are the rows that take part, in arrival order, padded with R (out of range: reads give zeros, writes are dropped).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, struct
from pagedjax_kernels import KVCache, copy_pages

from pagedjax.nn import Batch
from pagedjax.pages import Pages, alloc, cow, cow_need, first_needed, slide
from pagedjax.runner.state import EngineState, Rows, RowStatus
from pagedjax.sampling import SampleOutput, add_tokens, is_stop, sample

Params = Any  # the model's nnx.State


class StepReport(struct.PyTreeNode):
    """What the host reads after a mixed step, one entry a lane."""

    sampled: jax.Array  # bool[B] the lane got a new token
    ok: jax.Array  # bool[B] its pages could be had (False: the lane was left untouched)
    status: jax.Array  # i32[B] RowStatus after the step
    num_unowned: jax.Array  # i32 pages left
    num_copies: jax.Array  # i32 pages copied on a first write
    samples: SampleOutput


def gather(values: jax.Array, lanes: jax.Array) -> jax.Array:
    """values[lanes], zero for padded lanes."""
    return values.at[lanes].get(mode="fill", fill_value=0)


def pages_short(
    pages: Pages, lanes: jax.Array, starts: jax.Array, q_lens: jax.Array, chunk_pages: int = 1
) -> tuple[jax.Array, jax.Array]:
    """(need i32[B], short bool): new pages per lane to write q_lens tokens from `starts` on, and whether too few are unowned.

    Lanes get whole chunks of `chunk_pages`. Copies of shared pages about to be written count too, so that a step traps
    before any row changes.
    """
    page_size = pages.tokens.shape[1]
    end = -(-(starts + q_lens) // (page_size * chunk_pages)) * chunk_pages
    need = jnp.where(q_lens > 0, jnp.maximum(end - gather(pages.num_pages, lanes), 0), 0)
    copied = cow_need(pages, _writers(pages, lanes, q_lens), starts // page_size)
    wanted = need.sum() * pages.table.shape[0] + copied.sum(dtype=jnp.int32)
    return need, wanted > pages.num_unowned


def _writers(pages: Pages, lanes: jax.Array, q_lens: jax.Array) -> jax.Array:
    return jnp.where(q_lens > 0, lanes, pages.table.shape[1])


def take_pages(
    pages: Pages,
    cache: KVCache,
    lanes: jax.Array,
    starts: jax.Array,
    q_lens: jax.Array,
    need: jax.Array,
    *,
    num_tokens: int,
    chunk_pages: int = 1,
) -> tuple[Pages, KVCache, jax.Array, jax.Array]:
    """Grow the lanes' tables by `need` pages and copy shared pages that are about to be written.

    num_tokens is static, at least sum(q_lens).

    Returns:
      pages, cache, ok bool[B] (lanes that may write; a failed lane keeps its table), i32 pages copied.
    """
    page_size = pages.tokens.shape[1]
    # A lane's tokens begin in a chunk it has or at the start of a new one.
    max_total = (num_tokens // (page_size * chunk_pages) + lanes.shape[0]) * chunk_pages * pages.num_groups
    pages, grown = alloc(pages, lanes, need, max_total=max_total)
    pages, copies, own = cow(pages, _writers(pages, lanes, jnp.where(grown, q_lens, 0)), starts // page_size)
    cache = copy_pages(cache, copies[:, 0], copies[:, 1])
    num_copies = jnp.sum(copies[:, 1] < pages.total_pages, dtype=jnp.int32)
    return pages, cache, grown & own, num_copies


def give_back(pages: Pages, lanes: jax.Array, positions: jax.Array, windows: tuple[int, ...]) -> Pages:
    """Give back what the lanes' next tokens, at `positions` i32[B], do not see. Nothing is traced without windows."""
    if not any(windows):
        return pages
    return slide(pages, lanes, first_needed(positions, windows, pages.page_size))[0]


def slots(pages: Pages, lane_rows: jax.Array, positions: jax.Array, valid: jax.Array) -> jax.Array:
    """Physical slots i32[G, T] of tokens at `positions` of rows `lane_rows`; invalid ones get distinct slots out of
    range."""
    num_pages, page_size = pages.tokens.shape
    page = pages.table.at[:, lane_rows, positions // page_size].get(mode="fill", fill_value=0)
    slot = page * page_size + (positions % page_size)[None]
    out_of_range = num_pages * page_size + jnp.arange(positions.shape[0], dtype=jnp.int32)
    return jnp.where(valid[None] & (page > 0), slot, out_of_range[None])


def ragged_batch(
    pages: Pages, rows: Rows, lanes: jax.Array, starts: jax.Array, q_lens: jax.Array, num_tokens: int, backend: str
) -> Batch:
    """Lay the lanes' next q_lens tokens out one after another in a batch of `num_tokens` (a static bucket)."""
    cu_q_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(q_lens, dtype=jnp.int32)])
    t = jnp.arange(num_tokens, dtype=jnp.int32)
    lane = jnp.minimum(jnp.searchsorted(cu_q_lens[1:], t, side="right").astype(jnp.int32), lanes.shape[0] - 1)
    valid = t < cu_q_lens[-1]
    positions = jnp.where(valid, starts[lane] + t - cu_q_lens[lane], 0)
    row = jnp.where(valid, lanes[lane], rows.max_rows)
    return Batch(
        token_ids=rows.token_ids.at[row, positions].get(mode="fill", fill_value=0),
        positions=positions,
        slot_mapping=slots(pages, row, positions, valid),
        page_table=pages.table.at[:, lanes].get(mode="fill", fill_value=0),
        kv_lens=jnp.where(q_lens > 0, starts + q_lens, 0),
        cu_q_lens=cu_q_lens,
        max_q_len=None,
        backend=backend,
    )


def decode_batch(pages: Pages, rows: Rows, lanes: jax.Array, active: jax.Array, backend: str) -> Batch:
    """The next token of each active lane; token b belongs to lane b."""
    positions = gather(rows.num_computed, lanes)
    return Batch(
        token_ids=rows.token_ids.at[lanes, positions].get(mode="fill", fill_value=0),
        positions=positions,
        slot_mapping=slots(pages, lanes, positions, active),
        page_table=pages.table.at[:, lanes].get(mode="fill", fill_value=0),
        kv_lens=jnp.where(active, positions + 1, 0),
        cu_q_lens=jnp.arange(lanes.shape[0] + 1, dtype=jnp.int32),
        max_q_len=1,
        backend=backend,
    )


def append(rows: Rows, lanes: jax.Array, samples: jax.Array, logits: jax.Array) -> tuple[Rows, SampleOutput]:
    """Sample a token for the lanes in `samples` bool[B] from logits f32[B, V], append it, and mark rows that ended."""
    num_tokens = gather(rows.num_tokens, lanes)
    num_generated = num_tokens - gather(rows.prompt_lens, lanes)
    target = jnp.where(samples, lanes, rows.max_rows)
    out = sample(logits, rows.sampling, target, rows.token_counts, positions=num_tokens, num_generated=num_generated)
    # Stop ids are masked out of the logits until min_tokens, so a sampled one always counts.
    stopped = is_stop(rows.sampling, target, out.tokens)
    full = num_tokens + 1 >= gather(rows.max_tokens, lanes)
    status = jnp.where(stopped, RowStatus.STOPPED, jnp.where(full, RowStatus.FULL, RowStatus.RUNNING)).astype(jnp.int32)
    rows = rows.replace(
        token_ids=rows.token_ids.at[target, num_tokens].set(out.tokens, mode="drop"),
        num_tokens=rows.num_tokens.at[target].add(1, mode="drop"),
        status=rows.status.at[target].set(status, mode="drop"),
        token_counts=add_tokens(rows.token_counts, target, out.tokens),
    )
    return rows, out


def mixed_step(
    graph: nnx.GraphDef,
    params: Params,
    state: EngineState,
    lanes: jax.Array,
    q_lens: jax.Array,
    *,
    num_tokens: int,
    backend: str,
    windows: tuple[int, ...] = (0,),
    chunk_pages: int = 1,
) -> tuple[EngineState, StepReport, jax.Array]:
    """Prefill chunks, decode steps, or both: each lane's next q_lens tokens, in one pass.

    Args:
      lanes: i32[B] rows in arrival order, those that decode first, padded with R.
      q_lens: i32[B] tokens of each lane; a lane samples where they reach its last known token.
      num_tokens: T, a static bucket of at least sum(q_lens).
      windows: static, of each layer group; what lies behind them when the step begins is given back first.
      chunk_pages: static, pages by which a row grows.

    Returns:
      state (donated), StepReport, hidden [T, d] (for prompt log-probabilities; stays on the device).
    """
    model = nnx.merge(graph, params)
    rows = state.rows
    starts = gather(rows.num_computed, lanes)
    q_lens = jnp.where(gather(rows.status, lanes) == RowStatus.RUNNING, q_lens, 0)
    pages = give_back(state.pages, lanes, starts, windows)
    need, _ = pages_short(pages, lanes, starts, q_lens, chunk_pages)
    pages, cache, ok, num_copies = take_pages(
        pages, state.cache, lanes, starts, q_lens, need, num_tokens=num_tokens, chunk_pages=chunk_pages
    )
    q_lens = jnp.where(ok, q_lens, 0)
    batch = ragged_batch(pages, rows, lanes, starts, q_lens, num_tokens, backend)
    hidden, cache = model(batch, cache)
    last = jnp.clip(batch.cu_q_lens[1:] - 1, 0, num_tokens - 1)
    samples = (q_lens > 0) & (starts + q_lens == gather(rows.num_tokens, lanes))
    logits = model.logits(hidden[last])
    rows = rows.replace(num_computed=rows.num_computed.at[lanes].add(q_lens, mode="drop"))
    rows, out = append(rows, lanes, samples, logits)
    state = EngineState(pages=pages, cache=cache, rows=rows)
    report = StepReport(
        sampled=samples,
        ok=ok,
        status=gather(rows.status, lanes),
        num_unowned=pages.num_unowned,
        num_copies=num_copies,
        samples=out,
    )
    return state, report, hidden
