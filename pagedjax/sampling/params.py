"""Sampling parameters of all rows as arrays, so that one compiled step serves every mixture of requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.errors import InvalidRequestError
from pagedjax.types import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams

MIN_TEMPERATURE = 1e-5
"""Below it a row is greedy. Above it, (logit - best logit) / temperature stays finite in float32."""

NUM_STOP = MAX_STOP_TOKEN_IDS + 8
"""Stop ids a row can hold: the request's own and up to eight end-of-sequence ids of the model."""


class RowSampling(NamedTuple):
    """How each of R rows samples. Ids are padded with V, which every scatter drops and no token equals.

    The same class, with numpy arrays and without the leading axis, is one row's worth of values (`row_values`).
    """

    temperature: jax.Array  # f32[R]; below MIN_TEMPERATURE is greedy
    top_k: jax.Array  # i32[R]; 0 keeps all
    top_p: jax.Array  # f32[R] in (0, 1]; 1 keeps all
    min_p: jax.Array  # f32[R] in [0, 1]; 0 keeps all
    presence: jax.Array  # f32[R]; 0 is off
    frequency: jax.Array  # f32[R]; 0 is off
    repetition: jax.Array  # f32[R]; 1 is off
    seed: jax.Array  # u32[R, 2]; high and low half of a 64-bit seed
    sample_index: jax.Array  # i32[R]; which of a request's n continuations
    stop_ids: jax.Array  # i32[R, NS]; ids that end the row
    held_ids: jax.Array  # i32[R, NS]; ids held back until min_tokens (stop_ids, and EOS even where it is ignored)
    min_tokens: jax.Array  # i32[R]; generated tokens before a held id may come
    bias_ids: jax.Array  # i32[R, NB]; used entries first
    bias_values: jax.Array  # f32[R, NB]
    num_logprobs: jax.Array  # i32[R]; most likely tokens to report, -1 for none at all


def init_row_sampling(
    num_rows: int, vocab_size: int, *, num_stop: int = NUM_STOP, num_bias: int = MAX_LOGIT_BIAS
) -> RowSampling:
    """R greedy rows without penalties, stops, bias or log-probabilities."""
    R, V = num_rows, vocab_size
    return RowSampling(
        temperature=jnp.zeros(R, jnp.float32),
        top_k=jnp.zeros(R, jnp.int32),
        top_p=jnp.ones(R, jnp.float32),
        min_p=jnp.zeros(R, jnp.float32),
        presence=jnp.zeros(R, jnp.float32),
        frequency=jnp.zeros(R, jnp.float32),
        repetition=jnp.ones(R, jnp.float32),
        seed=jnp.zeros((R, 2), jnp.uint32),
        sample_index=jnp.zeros(R, jnp.int32),
        stop_ids=jnp.full((R, num_stop), V, jnp.int32),
        held_ids=jnp.full((R, num_stop), V, jnp.int32),
        min_tokens=jnp.zeros(R, jnp.int32),
        bias_ids=jnp.full((R, num_bias), V, jnp.int32),
        bias_values=jnp.zeros((R, num_bias), jnp.float32),
        num_logprobs=jnp.full(R, -1, jnp.int32),
    )


def check_vocabulary(sampling: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequestError for a token id that the model does not have (JAX would drop it without a word)."""
    for field, ids in (("logit_bias", sampling.logit_bias or ()), ("stop_token_ids", sampling.stop_token_ids)):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise InvalidRequestError(field, f"token id {token} is not in the vocabulary of {vocab_size} tokens")


def uses_counts(sampling: SamplingParams) -> bool:
    """Whether the row's `token_counts` matter, that is, whether they must be reset when it starts."""
    return (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != (0.0, 0.0, 1.0)


def row_values(
    sampling: SamplingParams,
    *,
    vocab_size: int,
    eos_token_ids: Sequence[int] = (),
    seed: int,
    sample_index: int = 0,
    num_stop: int = NUM_STOP,
    num_bias: int = MAX_LOGIT_BIAS,
) -> RowSampling:
    """One row's values (numpy, no leading axis) from what the client asked for. Host side.

    Args:
      sampling: the request's parameters; `sampling.seed` takes precedence over `seed`.
      vocab_size: V, the padding of id lists.
      eos_token_ids: the model's end-of-sequence ids.
      seed: the 64-bit seed to use when the request brings none (one per request, drawn by the engine).
      sample_index: which of the request's continuations this is; each has its own noise.
      num_stop, num_bias: widths of the lists, as given to `init_row_sampling`.

    Raises:
      InvalidRequestError: an id outside the vocabulary, too many stop ids or biases, or min_tokens with every token
        of the vocabulary held back.
    """
    check_vocabulary(sampling, vocab_size)
    own = dict.fromkeys(sampling.stop_token_ids)
    eos = dict.fromkeys(i for i in eos_token_ids if 0 <= i < vocab_size)
    held = list({**eos, **own})
    if len(held) >= vocab_size and sampling.min_tokens > 0:
        raise InvalidRequestError("min_tokens", f"all {vocab_size} tokens of the vocabulary are stop ids")
    bias = sampling.logit_bias or {}
    if len(bias) > num_bias:
        raise InvalidRequestError("logit_bias", f"at most {num_bias} entries, got {len(bias)}")
    whole_seed = (seed if sampling.seed is None else sampling.seed) & (2**64 - 1)
    values: dict[str, Any] = dict(
        temperature=np.float32(sampling.temperature),
        top_k=np.int32(0 if sampling.top_k >= vocab_size else sampling.top_k),
        # A nucleus mass that rounds to zero would keep nothing; the smallest one that does not keeps the best token.
        top_p=max(np.float32(sampling.top_p), np.finfo(np.float32).tiny),
        min_p=np.float32(sampling.min_p),
        presence=np.float32(sampling.presence_penalty),
        frequency=np.float32(sampling.frequency_penalty),
        repetition=max(np.float32(sampling.repetition_penalty), np.finfo(np.float32).tiny),
        seed=np.array([whole_seed >> 32, whole_seed & 0xFFFFFFFF], np.uint32),
        sample_index=np.int32(sample_index),
        stop_ids=_padded(list(own) if sampling.ignore_eos else held, num_stop, vocab_size),
        held_ids=_padded(held, num_stop, vocab_size),
        min_tokens=np.int32(sampling.min_tokens),
        bias_ids=_padded(list(bias), num_bias, vocab_size),
        bias_values=np.pad(np.array(list(bias.values()), np.float32), (0, num_bias - len(bias))),
        num_logprobs=np.int32(-1 if sampling.logprobs is None else sampling.logprobs),
    )
    return RowSampling(**values)


def stack_rows(values: Sequence[RowSampling], width: int) -> RowSampling:
    """C = `width` rows of numpy values for `set_rows`; the last one repeats as padding (its row index is R)."""
    if not 0 < len(values) <= width:
        raise ValueError(f"values: need 1 to width = {width} rows, got {len(values)}")
    filled = [*values, *[values[-1]] * (width - len(values))]
    return jax.tree.map(lambda *field: np.stack(field), *filled)


def set_rows(params: RowSampling, rows: jax.Array, values: RowSampling) -> RowSampling:
    """Replaces rows[C] (padded with R) by values (each field [C, ...]). In place when `params` is donated."""
    return RowSampling(*(field.at[rows].set(new, mode="drop") for field, new in zip(params, values, strict=True)))


def is_stop(params: RowSampling, rows: jax.Array, tokens: jax.Array) -> jax.Array:
    """bool[B]: whether tokens[B] end their rows[B] (never for a padded lane)."""
    return jnp.any(params.stop_ids.at[rows].get(mode="fill", fill_value=-1) == tokens[:, None], axis=1)


def _padded(ids: list[int], width: int, fill: int) -> np.ndarray:
    if len(ids) > width:
        raise InvalidRequestError("stop_token_ids", f"at most {width} ids with the model's own, got {len(ids)}")
    return np.array(ids + [fill] * (width - len(ids)), np.int32)
