"""The request bodies. Types are checked here, ranges by `SamplingParams`, so that each limit is written once."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, WithJsonSchema
from typing_extensions import TypeAliasType

from pagedjax.errors import InvalidRequestError
from pagedjax.server.metrics import Metrics
from pagedjax.types import MAX_BEAM_WIDTH, MAX_DEADLINE_SECONDS, SamplingParams

logger = logging.getLogger(__name__)

# Lists that may be long are checked by hand: pydantic would collect an error for each of a million items.
_ids = {"type": "array", "items": {"type": "integer"}}
TokenIds = Annotated[Any, WithJsonSchema(_ids)]
Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                _ids,
                {"type": "array", "items": _ids},
            ]
        }
    ),
]

# Set by the endpoints, each in its own way.
_NOT_COPIED = ("logprobs", "max_tokens", "detokenize")

# Fields of other servers that change what is generated: leaving them out silently would be a wrong answer.
# fmt: off
_UNSUPPORTED = frozenset({
    "allowed_token_ids", "audio", "bad_words", "chat_template", "chat_template_kwargs",
    "documents", "ebnf", "functions", "guided_choice", "guided_grammar", "guided_json", "guided_regex", "json_schema",
    "kv_transfer_params", "logits_processors", "lora_path", "mm_processor_kwargs", "prediction",
    "prompt_embeds", "regex", "response_format", "stop_regex", "structured_outputs", "suffix", "tools", "typical_p",
})
# fmt: on
_HARMLESS = {"response_format": ({"type": "text"},)}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None


class _Generation(BaseModel):
    """What completions and chat have in common; null means the default everywhere."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    n: int | None = None
    temperature: float | None = Field(None, description="0 is greedy; at most 2; default 1")
    top_k: int | None = Field(None, description="candidates kept; 0 or -1: all")
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[Any, WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}})] = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array"}]})] = None
    stop_token_ids: TokenIds = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    use_beam_search: bool | None = Field(None, description="the n best of a beam search instead of sampling")
    best_of: int | None = Field(None, description="beams of a beam search, at least n; default n")
    beam_width: int | None = Field(None, description="the same")
    length_penalty: float | None = Field(None, description="beam search ranks by log-probability / length ** this")
    early_stopping: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "boolean"}, {"const": "never"}]})] = Field(
        None, description="when a beam search ends"
    )
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: int | None = Field(None, description="keep only so many of the prompt's last tokens")
    cache_salt: str | None = Field(None, max_length=256, description="requests with different salts share no pages")
    return_token_ids: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="lower is more urgent")
    deadline_ms: float | None = Field(
        None, gt=0, le=MAX_DEADLINE_SECONDS * 1000, description="milliseconds after which the request is ended"
    )

    @property
    def deadline(self) -> float | None:
        """Seconds."""
        return None if self.deadline_ms is None else self.deadline_ms / 1000

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def refuse_unsupported(self, metrics: Metrics) -> None:
        """InvalidRequestError for a field that would change the answer; counts the unknown ones."""
        for name, value in (self.model_extra or {}).items():
            if name in _UNSUPPORTED:
                if value not in (None, False, "", [], {}) and value not in _HARMLESS.get(name, ()):
                    raise InvalidRequestError(name, "not supported yet")
            else:
                metrics.ignored_fields.inc()
                logger.debug("ignored request field %r", name[:64])
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options", "only with stream = true")

    def sampling_params(self, **changes: Any) -> SamplingParams:
        """The sampling parameters that were given; `changes` win. InvalidRequestError names the field."""
        if self.stop_token_ids is not None and not isinstance(self.stop_token_ids, list):
            raise InvalidRequestError("stop_token_ids", "must be a list of token ids")
        if not isinstance(self.stop, (str, list, type(None))):
            raise InvalidRequestError("stop", "must be a string or a list of strings")
        if not isinstance(self.logit_bias, (Mapping, type(None))):
            raise InvalidRequestError("logit_bias", "must map token ids to numbers")
        names = [f.name for f in dataclasses.fields(SamplingParams) if f.name not in _NOT_COPIED]
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return SamplingParams(**{**given, **self._beams(), **changes})

    def _beams(self) -> dict[str, int]:
        if self.use_beam_search:
            if self.stream:
                raise InvalidRequestError("stream", "a beam search has its answer only at the end; leave it out")
            widths = {w for w in (self.best_of, self.beam_width) if w is not None} or {self.n or 1}
            if len(widths) > 1:
                raise InvalidRequestError("beam_width", f"differs from best_of = {self.best_of}: {self.beam_width}")
            width = widths.pop()
            if not 1 <= width <= MAX_BEAM_WIDTH:
                name = next((x for x in ("best_of", "beam_width") if getattr(self, x) is not None), "n")
                raise InvalidRequestError(name, f"must be in [1, {MAX_BEAM_WIDTH}] with beam search, got {width}")
            return {"beam_width": width}
        for name, neutral in (("best_of", 1), ("beam_width", 0), ("length_penalty", 1), ("early_stopping", False)):
            if getattr(self, name) not in (None, neutral):
                raise InvalidRequestError(name, "only with use_beam_search = true")
        return {"beam_width": 0}


class CompletionRequest(_Generation):
    prompt: Prompt
    echo: bool | None = None
    logprobs: int | None = Field(None, description="most likely tokens to report at each position")

    def aliases(self) -> dict[str, str]:
        return {}


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Any = Field(None, json_schema_extra={"anyOf": [{"type": "string"}, {"type": "array"}]})


# A named alias, because Python 3.11 cannot put FailFast, which is not hashable, into a union.
Messages = TypeAliasType("Messages", Annotated[list[ChatMessage], FailFast(), Field(min_length=1)])


class ChatCompletionRequest(_Generation):
    messages: Messages
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = Field(False, description="go on with the last message instead of answering it")

    def aliases(self) -> dict[str, str]:
        """Engine's field -> the name the client used."""
        out = {"prompt": "messages", "prompt_ids": "messages", "logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            out["max_tokens"] = "max_completion_tokens"
        return out


class TokenizeRequest(BaseModel):
    model_config = ConfigDict(strict=True)
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(strict=True)
    model: str | None = None
    tokens: TokenIds
