"""Logits to tokens, for all lanes of a step, each with the parameters of its row."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.sampling.logprobs import LogprobsOutput, logprobs_of
from pagedjax.sampling.params import RowSampling
from pagedjax.sampling.penalties import adjust, adjusts
from pagedjax.sampling.random import row_keys
from pagedjax.sampling.select import NUM_CANDIDATES, Limits, argmax, select
from pagedjax.types import MAX_LOGPROBS


class SampleOutput(NamedTuple):
    """One token per lane. The rest is zero unless some lane of the step asked for log-probabilities."""

    tokens: jax.Array  # i32[B]; padded lanes hold a token of no meaning
    logprobs: jax.Array  # f32[B]; natural logarithm, of the raw logits
    ranks: jax.Array  # i32[B]; 1 is the most likely
    top_ids: jax.Array  # i32[B, MAX_LOGPROBS]
    top_logprobs: jax.Array  # f32[B, MAX_LOGPROBS]


def sample(
    logits: jax.Array,
    params: RowSampling,
    rows: jax.Array,
    token_counts: jax.Array,
    positions: jax.Array,
    num_generated: jax.Array,
    *,
    num_candidates: int = NUM_CANDIDATES,
) -> SampleOutput:
    """Chooses the next token of each lane.

    Order: penalties, bias, ids held back by min_tokens; temperature; top-k; top-p; min-p; Gumbel-max. A lane's result
    depends on its own logits, parameters and position only. Lanes that are greedy and unadjusted cost one argmax; each
    other part runs only when a lane of the step needs it (so do not vmap this: a branch would become a select).

    Args:
      logits: [B, V'], any float dtype. Columns beyond V (a head padded to a round size) are never chosen.
      params: of R rows.
      rows: i32[B], the lanes' rows, padded with R.
      token_counts: i32[R, V], see `penalties`; the caller adds the chosen tokens (`add_tokens`).
      positions: i32[B], the position the new token will have in its sequence; part of the random key.
      num_generated: i32[B], tokens the row has generated so far (for min_tokens).
      num_candidates: static; see `select`.
    """
    V = token_counts.shape[1]
    if logits.shape[1] < V:
        raise ValueError(f"logits: have {logits.shape[1]} columns, token_counts knows {V} tokens")
    raw = logits[:, :V].astype(jnp.float32)
    take = lambda field, fill: field.at[rows].get(mode="fill", fill_value=fill)  # noqa: E731
    limits = Limits(
        take(params.temperature, 0.0), take(params.top_k, 0), take(params.top_p, 1.0), take(params.min_p, 0.0)
    )
    adjusted = adjusts(params, rows, num_generated, V)

    def general() -> jax.Array:
        scores = adjust(raw, params, rows, token_counts, num_generated)
        keys = row_keys(take(params.seed, 0), take(params.sample_index, 0), positions)
        return select(scores, limits, keys, num_candidates=num_candidates)

    tokens = lax.cond(jnp.any(adjusted | ~limits.greedy), general, lambda: argmax(raw)[1])
    found = lax.cond(
        jnp.any(take(params.num_logprobs, -1) >= 0),
        lambda: logprobs_of(raw, tokens),
        lambda: _no_logprobs(rows.shape[0]),
    )
    return SampleOutput(tokens, *found)


def _no_logprobs(B: int) -> LogprobsOutput:
    return LogprobsOutput(
        jnp.zeros(B, jnp.float32),
        jnp.zeros(B, jnp.int32),
        jnp.zeros((B, MAX_LOGPROBS), jnp.int32),
        jnp.zeros((B, MAX_LOGPROBS), jnp.float32),
    )
