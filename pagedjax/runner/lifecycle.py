"""The beginning and the end of a row: admit (match + fill in), settle (publish, release), prompt log-probabilities."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax import lax
from pagedjax_kernels import KVCache, copy_pages, permute_pages

from pagedjax.pages import NULL_PAGE, Pages, adopt, compact, contiguity, match, publish, remap, reserve
from pagedjax.runner.state import EngineState, RowStatus
from pagedjax.runner.step import Params, gather, give_back
from pagedjax.sampling import LogprobsOutput, RowSampling, prompt_logprobs, reset_counts, set_rows

Values = Any  # a jax.Array inside programs, numpy or a shape outside


class Admission(struct.PyTreeNode):
    """Sequences to be given rows, C at a time. Padded entries have row R."""

    rows: Values  # i32[C] empty rows
    token_ids: Values  # i32[C, M] what is known: the prompt, and what a preempted sequence had generated
    num_tokens: Values  # i32[C]
    prompt_lens: Values  # i32[C]
    max_tokens: Values  # i32[C] total length
    match_tokens: Values  # i32[C] tokens the prefix cache may serve; 1 turns it off
    namespaces: Values  # i32[C]
    num_reserved: Values  # i32[C] pages to reserve in one piece; looked at where `admit` reserves
    sampling: RowSampling  # each field [C, ...]
    uses_counts: Values  # bool[C] the row's penalties need token_counts


def admit(
    state: EngineState, new: Admission, *, windows: tuple[int, ...] = (0,), reserves: bool = False
) -> tuple[EngineState, tuple[jax.Array, jax.Array, jax.Array]]:
    """Fill in rows for new sequences and map the pages that the prefix cache has for them, as far as windows see them.

    Args:
      windows: static, of each layer group.
      reserves: static; rows get all their pages now, in one piece, and the prefix cache is not asked.

    Returns:
      state (donated), (hits i32[C] tokens found, ok bool[C] the row's pages could be reserved, num_unowned i32).
    """
    rows = state.rows
    if reserves:
        pages, ok = reserve(state.pages, new.rows, new.num_reserved)
        cache, hits = state.cache, jnp.zeros_like(new.rows)
    else:
        pages, cache, hits = _find(state, new, windows)
        ok = jnp.ones_like(new.rows, jnp.bool_)

    def put(values: jax.Array, update: jax.Array) -> jax.Array:
        return values.at[new.rows].set(update, mode="drop")

    counted = jnp.where(new.uses_counts, new.rows, rows.max_rows)
    rows = rows.replace(
        token_ids=put(rows.token_ids, new.token_ids),
        num_tokens=put(rows.num_tokens, new.num_tokens),
        num_computed=put(rows.num_computed, hits),
        prompt_lens=put(rows.prompt_lens, new.prompt_lens),
        max_tokens=put(rows.max_tokens, new.max_tokens),
        status=put(rows.status, jnp.full_like(new.rows, RowStatus.RUNNING)),
        sampling=set_rows(rows.sampling, new.rows, new.sampling),
        token_counts=reset_counts(rows.token_counts, counted, new.token_ids, new.prompt_lens, new.num_tokens),
    )
    return EngineState(pages=pages, cache=cache, rows=rows), (hits, ok, pages.num_unowned)


def _find(state: EngineState, new: Admission, windows: tuple[int, ...]) -> tuple[Pages, KVCache, jax.Array]:
    """Map what the prefix cache has; pages, cache, i32[C] tokens found."""
    pages, matched = match(state.pages, new.rows, new.token_ids, new.match_tokens, new.namespaces)
    cache, hits = state.cache, matched * pages.page_size
    if pages.num_groups == 1:  # a hit within a page would have to be found in every group
        pages, copies, partly = adopt(pages, new.rows, new.token_ids, new.match_tokens, new.namespaces)
        cache = copy_pages(cache, copies[:, 0], copies[:, 1])
        hits = hits + partly
    return give_back(pages, new.rows, hits, windows), cache, hits


class SettleReport(struct.PyTreeNode):
    """What the host may read after a settlement, one entry a row."""

    num_unowned: jax.Array  # i32 pages left
    num_published: jax.Array  # i32[C] leading pages of the row that are in the prefix index
    pages: jax.Array  # i32[G, C, P] the row's pages, before it was released; NULL_PAGE where one was given back
    generations: jax.Array  # u32[G, C, P] of those pages


def settle(
    state: EngineState,
    rows: jax.Array,
    lengths: jax.Array,
    namespaces: jax.Array,
    release: jax.Array,
    *,
    windows: tuple[int, ...] = (0,),
) -> tuple[EngineState, SettleReport]:
    """Publish the full pages of the rows' first `lengths` tokens, then empty the rows in `release`, whose unfilled last
    page is published too; the others give back what is behind their windows.

    Args:
      rows: i32[C], padded with R.
      lengths: i32[C] tokens whose keys and values are final; 0 publishes nothing.
      release: bool[C].

    Returns:
      state (donated), SettleReport.
    """
    R = state.rows.max_rows
    tokens = state.rows.token_ids.at[rows].get(mode="fill", fill_value=0)
    tails = release if state.pages.num_groups == 1 else None
    pages, num_published = publish(state.pages, rows, tokens, lengths, namespaces, tails)
    held = pages.table.at[:, rows].get(mode="fill", fill_value=NULL_PAGE)
    kept = jnp.where(release, R, rows)
    pages = give_back(pages, kept, gather(state.rows.num_computed, kept), windows)
    gone = jnp.where(release, rows, R)
    pages, _ = remap(pages, gone, jnp.full_like(rows, R))
    status = state.rows.status.at[gone].set(RowStatus.EMPTY, mode="drop")
    report = SettleReport(
        num_unowned=pages.num_unowned,
        num_published=num_published,
        pages=held,
        generations=pages.generation[held],
    )
    return state.replace(pages=pages, rows=state.rows.replace(status=status)), report


def compact_pages(state: EngineState) -> tuple[EngineState, tuple[jax.Array, jax.Array]]:
    """Renumber and move pages so that each row lies in one piece.

    Returns:
      state (donated), (contiguity f32 before, contiguity f32 after).
    """
    before = contiguity(state.pages)
    pages, source = compact(state.pages)
    state = state.replace(pages=pages, cache=permute_pages(state.cache, source))
    return state, (before, contiguity(pages))


def score_prompt(
    graph: nnx.GraphDef, params: Params, hidden: jax.Array, next_ids: jax.Array, *, tile: int = 32
) -> LogprobsOutput:
    """Log-probabilities of known next tokens, a tile of positions at a time so that [T, V] logits never exist.

    Args:
      hidden: [T, d] of a mixed step.
      next_ids: i32[T] the token that follows each position.
    """
    model = nnx.merge(graph, params)
    T = hidden.shape[0]
    tile = min(tile, T)
    tiles = -(-T // tile)
    pad = tiles * tile - T
    hidden = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(tiles, tile, -1)
    next_ids = jnp.pad(next_ids, (0, pad)).reshape(tiles, tile)
    out = lax.map(lambda xs: prompt_logprobs(model.logits(xs[0]), xs[1]), (hidden, next_ids))
    return jax.tree.map(lambda x: x.reshape(tiles * tile, *x.shape[2:])[:T], out)
