"""What goes into the engine and what comes out. Plain Python: no jax, no numpy."""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
from collections.abc import Mapping, Sequence

from pagedjax.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 32
MAX_LOGIT_BIAS = 1024
MAX_N = 64
MAX_BEAM_WIDTH = 10
"""Twice as many continuations of each beam are looked at, and MAX_LOGPROBS come from the device."""


class FinishReason(enum.StrEnum):
    """Why a sequence ended: `stop` (EOS, stop id or stop string), `length`, or `abort` (client gone or engine drained)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


def _number(field: str, value: object, low: float, high: float, *, low_open: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidRequestError(field, f"must be a number, got {value!r}")
    try:
        value = float(value)
    except OverflowError:
        raise InvalidRequestError(
            field, f"must be a finite number, got an integer of {len(str(value))} digits"
        ) from None
    below = value <= low if low_open else value < low
    if not math.isfinite(value) or below or value > high:
        bracket = "(" if low_open else "["
        raise InvalidRequestError(field, f"must be in {bracket}{low:g}, {high:g}], got {value!r}")
    return value


def _integer(field: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(field, f"must be an integer, got {value!r}")
    if not low <= value <= high:
        raise InvalidRequestError(field, f"must be in [{low}, {high}], got {value}")
    return value


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. Checked on construction: a bad value raises InvalidRequestError naming the field.

    Checks that need the model (token ids below the vocabulary, lengths against the context) are made by the engine
    when the request is added.

    Attributes:
      n: continuations per prompt, 1 to 64.
      temperature: 0 is greedy; values below 1e-5 are treated as 0. At most 2.
      top_k: candidates kept, 0 or -1 for all. A value above the vocabulary means all.
      top_p: nucleus mass kept, in (0, 1].
      min_p: keep tokens whose probability is at least min_p times the best one's, in [0, 1].
      seed: 64-bit seed; None draws one. A seeded continuation does not depend on what else is in the batch.
      presence_penalty, frequency_penalty: in [-2, 2], count generated tokens only.
      repetition_penalty: in (0, 10], counts prompt and generated tokens; 1 is off.
      logit_bias: token id -> bias added to its logit, clamped to [-100, 100].
      max_tokens: most tokens to generate; None means as many as the context holds.
      min_tokens: EOS and stop ids are held back until this many tokens are generated.
      ignore_eos: go on past the model's end-of-sequence ids.
      stop: strings that end the text (which is cut just before them).
      stop_token_ids: token ids that end the sequence.
      include_stop_str_in_output: keep the stop string in the text.
      logprobs: number of most likely tokens to report per generated token (0: only the chosen one), None for off.
      prompt_logprobs: the same per prompt token.
      skip_special_tokens: leave special tokens out of the text.
      beam_width: beams of a beam search, at most 10; 0 samples. The best n of them are the answer. Temperature, top-k,
        top-p, min-p and seed mean nothing then; penalties, bias, min_tokens, stop strings and ids, and log-probabilities
        are refused.
      length_penalty: a hypothesis is ranked by its log-probability divided by its length to this power, in [-10, 10].
      early_stopping: true ends the search when beam_width hypotheses have ended; false when the best open beam, at its
        present length, cannot beat the worst of them; "never" when it cannot at any length.
      detokenize: produce text (False: token ids only; then stop strings are refused).
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        _integer("n", self.n, 1, MAX_N)
        put("temperature", _number("temperature", self.temperature, 0, 2))
        put("top_k", max(0, _integer("top_k", self.top_k, -1, 2**31 - 1)))
        put("top_p", _number("top_p", self.top_p, 0, 1, low_open=True))
        put("min_p", _number("min_p", self.min_p, 0, 1))
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        put("presence_penalty", _number("presence_penalty", self.presence_penalty, -2, 2))
        put("frequency_penalty", _number("frequency_penalty", self.frequency_penalty, -2, 2))
        put("repetition_penalty", _number("repetition_penalty", self.repetition_penalty, 0, 10, low_open=True))
        put("logit_bias", self._checked_bias())
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                "min_tokens", f"must be at most max_tokens = {self.max_tokens}, got {self.min_tokens}"
            )
        put("stop", self._checked_stop())
        ids = tuple(self.stop_token_ids or ())
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids, got {len(ids)}")
        put("stop_token_ids", tuple(_integer("stop_token_ids", i, 0, 2**31 - 1) for i in ids))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(name, f"must be true or false, got {getattr(self, name)!r}")
        if self.stop and not self.detokenize:
            raise InvalidRequestError("stop", "stop strings need detokenize=True")
        put("length_penalty", _number("length_penalty", self.length_penalty, -10, 10))
        self._check_beams()

    def _check_beams(self) -> None:
        _integer("beam_width", self.beam_width, 0, MAX_BEAM_WIDTH)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidRequestError("early_stopping", f'must be true, false or "never", got {self.early_stopping!r}')
        if not self.beam_width:
            return
        if self.n > self.beam_width:
            raise InvalidRequestError("n", f"must be at most the number of beams = {self.beam_width}, got {self.n}")
        neutral = {
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "logit_bias": None,
            "min_tokens": 0,
            "stop": (),
            "stop_token_ids": (),
            "logprobs": None,
            "prompt_logprobs": None,
        }
        for name, value in neutral.items():
            if getattr(self, name) != value:
                raise InvalidRequestError(name, "is not supported with beam search")

    def _checked_bias(self) -> dict[int, float] | None:
        if not self.logit_bias:
            return None
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequestError("logit_bias", f"must map token ids to numbers, got {self.logit_bias!r}")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequestError("logit_bias", f"at most {MAX_LOGIT_BIAS} entries, got {len(self.logit_bias)}")
        out = {}
        for key, value in self.logit_bias.items():
            try:
                token = int(key)
            except (TypeError, ValueError):
                raise InvalidRequestError("logit_bias", f"keys are token ids, got {key!r}") from None
            _integer("logit_bias", token, 0, 2**31 - 1)
            out[token] = min(100.0, max(-100.0, _number("logit_bias", value, -1e30, 1e30)))
        return out

    def _checked_stop(self) -> tuple[str, ...]:
        if self.stop is not None and not isinstance(self.stop, (str, list, tuple)):
            raise InvalidRequestError("stop", f"must be a string or a list of strings, got {self.stop!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError("stop", f"at most {MAX_STOP_STRINGS} strings, got {len(stop)}")
        for s in stop:
            if not isinstance(s, str):
                raise InvalidRequestError("stop", f"must be strings, got {s!r}")
            if not s:
                raise InvalidRequestError("stop", "an empty stop string would end every answer at once; leave it out")
        return stop

    @property
    def num_sequences(self) -> int:
        """Sequences that run for one prompt: beams, or continuations."""
        return self.beam_width or self.n

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5


@dataclasses.dataclass(frozen=True)
class Request:
    """What a client asked for: one prompt and how to continue it `sampling.n` times.

    Attributes:
      request_id: unique among the requests in flight.
      prompt_ids: the prompt's token ids, at least one.
      sampling: how to continue it.
      cache_salt: prefix-cache namespace; prompts with different salts never share pages. "" is the common one.
      prompt: the text the ids came from, where there was one.
      read_prefix_cache: False computes the whole prompt.
      priority: lower is more urgent; counts where scheduler.policy is `priority`.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    cache_salt: str = ""
    prompt: str | None = None
    read_prefix_cache: bool = True
    priority: int = 0


@dataclasses.dataclass(frozen=True)
class Logprob:
    """One candidate token. `rank` counts from 1 (the most likely); `logprob` is a natural logarithm, finite or None."""

    token_id: int
    logprob: float
    rank: int | None = None
    token: str = ""


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """The chosen token, and the most likely ones at its position, most likely first."""

    chosen: Logprob
    top: tuple[Logprob, ...] = ()


@dataclasses.dataclass
class CompletionOutput:
    """One continuation. In a streamed delta, `text`, `token_ids` and `logprobs` hold only what is new.
    `cumulative_logprob` is the sum over the tokens; beam search reports it."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclasses.dataclass
class RequestOutput:
    """A request's continuations so far (or, when streaming, what is new of them).

    Attributes:
      outputs: one per continuation (`n`); in a delta, only those with news.
      num_cached_tokens: prompt tokens that were found in the prefix cache (of the first continuation).
      prompt_logprobs: one entry a prompt token, the first None; None when not asked for.
      finished: every continuation has ended.
      num_generated_tokens: over all continuations, so far.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    outputs: list[CompletionOutput]
    finished: bool
    prompt: str | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_generated_tokens: int = 0
