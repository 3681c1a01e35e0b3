"""What changes logits before a token is chosen: penalties, bias, ids held back. And the counts that penalties need.

`token_counts` i32[R, V] packs a row's history: bits 0-29 count how often the token was generated, bit 30 says that it
occurs in the prompt. Repetition looks at both, presence and frequency at the generated part only.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.sampling.params import RowSampling

PROMPT_BIT = 1 << 30
_LARGEST = 1e30
"""Adjusted logits are clipped to it, so that dividing by a tiny penalty or temperature stays finite."""


def init_token_counts(num_rows: int, vocab_size: int) -> jax.Array:
    """i32[R, V] of zeros."""
    return jnp.zeros((num_rows, vocab_size), jnp.int32)


def reset_counts(
    token_counts: jax.Array, rows: jax.Array, token_ids: jax.Array, prompt_lengths: jax.Array, lengths: jax.Array
) -> jax.Array:
    """Counts of rows that start, or start again after a preemption. In place when `token_counts` is donated.

    Only rows with a penalty need it (`uses_counts`).

    Args:
      token_counts: i32[R, V].
      rows: i32[C], padded with R.
      token_ids: i32[C, M], prompt and then what was generated; anything beyond `lengths`.
      prompt_lengths: i32[C].
      lengths: i32[C], prompt and generated tokens together.
    """
    V = token_counts.shape[1]
    position = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None, :]
    in_prompt = position < prompt_lengths[:, None]
    generated = ~in_prompt & (position < lengths[:, None])
    token_counts = token_counts.at[rows].set(0, mode="drop")
    lane_rows = rows[:, None]
    token_counts = token_counts.at[lane_rows, jnp.where(in_prompt, token_ids, V)].set(PROMPT_BIT, mode="drop")
    return token_counts.at[lane_rows, jnp.where(generated, token_ids, V)].add(1, mode="drop")


def add_tokens(token_counts: jax.Array, rows: jax.Array, tokens: jax.Array) -> jax.Array:
    """Counts one more generated token per lane: rows i32[B] (padded with R), tokens i32[B]. In place when donated."""
    return token_counts.at[rows, tokens].add(1, mode="drop")


def _take(field: jax.Array, rows: jax.Array, fill: int | float) -> jax.Array:
    return field.at[rows].get(mode="fill", fill_value=fill)


def adjusts(params: RowSampling, rows: jax.Array, num_generated: jax.Array, vocab_size: int) -> jax.Array:
    """bool[B]: whether `adjust` would change a lane's logits (never for a padded lane)."""
    return (
        _penalised(params, rows)
        | (_take(params.bias_ids[:, 0], rows, vocab_size) < vocab_size)
        | (num_generated < _take(params.min_tokens, rows, 0))
    )


def adjust(
    logits: jax.Array, params: RowSampling, rows: jax.Array, token_counts: jax.Array, num_generated: jax.Array
) -> jax.Array:
    """f32[B, V]: logits after repetition, frequency and presence penalty, then bias, then ids held back at -inf.

    The formulas are those of the OpenAI API (presence, frequency, bias: subtracted or added) and of CTRL
    (Keskar et al. 2019, repetition: a positive logit is divided by the penalty, another one multiplied).
    """
    V = logits.shape[1]
    lane = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]

    def penalise(x: jax.Array) -> jax.Array:
        counts = _take(token_counts, rows, 0)
        generated = counts & (PROMPT_BIT - 1)
        repetition = _take(params.repetition, rows, 1.0)[:, None]
        x = jnp.where(counts > 0, jnp.where(x > 0, x / repetition, x * repetition), x)
        x = x - _take(params.frequency, rows, 0.0)[:, None] * generated.astype(jnp.float32)
        x = x - jnp.where(generated > 0, _take(params.presence, rows, 0.0)[:, None], 0.0)
        return jnp.clip(x, -_LARGEST, _LARGEST)

    def add_bias(x: jax.Array) -> jax.Array:
        return x.at[lane, _take(params.bias_ids, rows, V)].add(_take(params.bias_values, rows, 0.0), mode="drop")

    held = num_generated < _take(params.min_tokens, rows, 0)

    def hold_back(x: jax.Array) -> jax.Array:
        ids = jnp.where(held[:, None], _take(params.held_ids, rows, V), V)
        return x.at[lane, ids].set(-jnp.inf, mode="drop")

    def change(x: jax.Array) -> jax.Array:
        x = lax.cond(jnp.any(_penalised(params, rows)), penalise, lambda x: x, x)
        x = lax.cond(jnp.any(_take(params.bias_ids[:, 0], rows, V) < V), add_bias, lambda x: x, x)
        return lax.cond(jnp.any(held), hold_back, lambda x: x, x)

    # Every branch not taken may still cost a copy of the logits: one for all three where nobody asks for anything.
    return lax.cond(jnp.any(adjusts(params, rows, num_generated, V)), change, lambda x: x, logits)


def _penalised(params: RowSampling, rows: jax.Array) -> jax.Array:
    return (
        (_take(params.repetition, rows, 1.0) != 1.0)
        | (_take(params.frequency, rows, 0.0) != 0.0)
        | (_take(params.presence, rows, 0.0) != 0.0)
    )
