"""Natural-log probabilities of the model itself: softmax of the raw logits, before penalties, bias and temperature."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pagedjax.types import MAX_LOGPROBS, Logprob, TokenLogprobs

MIN_LOGPROB = -9999.0
"""What the host reports for a chosen token whose log-probability is not a finite number: JSON has no infinity."""


class LogprobsOutput(NamedTuple):
    """Of M positions. Where the vocabulary has fewer than MAX_LOGPROBS tokens, the rest is (V, -inf)."""

    logprobs: jax.Array  # f32[M]; of the chosen token
    ranks: jax.Array  # i32[M]; 1 is the most likely; of equal ones the lower id comes first
    top_ids: jax.Array  # i32[M, MAX_LOGPROBS]; most likely first
    top_logprobs: jax.Array  # f32[M, MAX_LOGPROBS]


def logprobs_of(logits: jax.Array, tokens: jax.Array) -> LogprobsOutput:
    """Log-probability and rank of tokens i32[M] under logits [M, V], and the most likely tokens."""
    logits = logits.astype(jnp.float32)
    V = logits.shape[1]
    normaliser = jax.nn.logsumexp(logits, axis=1)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1, mode="clip")
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    before = (logits > chosen) | ((logits == chosen) & (ids < tokens[:, None]))
    top, top_ids = lax.top_k(logits, min(V, MAX_LOGPROBS))
    missing = ((0, 0), (0, MAX_LOGPROBS - top.shape[1]))
    return LogprobsOutput(
        logprobs=chosen[:, 0] - normaliser,
        ranks=1 + jnp.sum(before, axis=1, dtype=jnp.int32),
        top_ids=jnp.pad(top_ids.astype(jnp.int32), missing, constant_values=V),
        top_logprobs=jnp.pad(top - normaliser[:, None], missing, constant_values=-jnp.inf),
    )


def prompt_logprobs(logits: jax.Array, next_ids: jax.Array) -> LogprobsOutput:
    """What the model thought of the prompt: logits [T, V] of its positions, next_ids i32[T] the tokens that follow."""
    return logprobs_of(logits, next_ids)


def host_logprobs(
    token_id: int, logprob: float, rank: int, top_ids: np.ndarray, top_logprobs: np.ndarray, num: int
) -> TokenLogprobs:
    """One position for the outside. Host side; nothing that is not finite leaves.

    Masked candidates are left out; a chosen token without a finite log-probability gets MIN_LOGPROB.

    Args:
      token_id, logprob, rank: the chosen token.
      top_ids, top_logprobs: [>= num], most likely first.
      num: how many of them were asked for, 0 to MAX_LOGPROBS.
    """
    value = float(logprob)
    chosen = Logprob(int(token_id), value if math.isfinite(value) else MIN_LOGPROB, int(rank))
    top = tuple(
        Logprob(int(i), float(p), place)
        for place, (i, p) in enumerate(zip(top_ids[:num], top_logprobs[:num], strict=True), start=1)
        if math.isfinite(p)
    )
    return TokenLogprobs(chosen, top)
