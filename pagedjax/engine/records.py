"""Requests and sequences in flight as JSON values, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pagedjax.engine.admission import make_group
from pagedjax.engine.beams import BeamGroup
from pagedjax.engine.group import Continuation, RequestGroup
from pagedjax.scheduler import Phase, Sequence
from pagedjax.types import FinishReason, Logprob, Request, SamplingParams, TokenLogprobs
from pagedjax.weights import LoadedModel

Record = dict[str, Any]

_LINKS = ("request", "parent", "token_ids")
"""Fields of a sequence that are no plain values, and follow from the request."""
_NEWS = ("new_text", "new_ids", "stop_reason", "reported_end")


def request_record(request: Request) -> Record:
    """A request as JSON values."""
    return dataclasses.asdict(request)


def request_from(record: Mapping[str, Any]) -> Request:
    """The inverse of `request_record`."""
    sampling = SamplingParams(**record["sampling"])
    return Request(**{**record, "prompt_ids": tuple(record["prompt_ids"]), "sampling": sampling})


def sampling_record(sampling: SamplingParams) -> Record:
    """Sampling parameters as JSON values."""
    return dataclasses.asdict(sampling)


def group_record(group: RequestGroup) -> Record:
    """A request in flight with all its continuations."""
    return {
        "request": request_record(group.request),
        "num_cached_tokens": group.num_cached_tokens,
        "prompt_logprobs": [None if e is None else dataclasses.asdict(e) for e in group.prompt_logprobs],
        "continuations": [_continuation_record(c) for c in group.continuations],
        "beams": group.record() if isinstance(group, BeamGroup) else None,
    }


def group_from(record: Mapping[str, Any], loaded: LoadedModel, *, max_model_len: int) -> RequestGroup:
    """The inverse of `group_record`; the text is followed again from the token ids."""
    first = record["continuations"][0]
    group = make_group(
        request_from(record["request"]),
        loaded,
        max_model_len=max_model_len,
        rank=first["sequence"]["rank"],
        namespace=first["sequence"]["namespace"],
        seed=first["seed"],
    )
    for continuation, entry in zip(group.continuations, record["continuations"], strict=True):
        _fill_sequence(continuation.sequence, entry["sequence"])
        _fill_continuation(continuation, entry)
        if continuation.text is not None and continuation.finish_reason is None and not isinstance(group, BeamGroup):
            continuation.text.append(continuation.sequence.known_ids[continuation.sequence.prompt_len :].tolist())
    if isinstance(group, BeamGroup):  # they have no text before the end
        group.load(record["beams"])
    group.num_cached_tokens = record["num_cached_tokens"]
    group.prompt_logprobs = [None if e is None else _logprobs_from(e) for e in record["prompt_logprobs"]]
    return group


def _continuation_record(continuation: Continuation) -> Record:
    high, low = (int(word) for word in continuation.sampling.seed)
    return {
        "sequence": _sequence_record(continuation.sequence),
        "seed": (high << 32) | low,
        "new_logprobs": [dataclasses.asdict(e) for e in continuation.new_logprobs],
        "finish_reason": continuation.finish_reason,
        **{name: getattr(continuation, name) for name in _NEWS},
    }


def _fill_continuation(continuation: Continuation, record: Mapping[str, Any]) -> None:
    reason = record["finish_reason"]
    continuation.finish_reason = None if reason is None else FinishReason(reason)
    continuation.new_logprobs = [_logprobs_from(e) for e in record["new_logprobs"]]
    for name in _NEWS:
        setattr(continuation, name, record[name])


def _sequence_record(sequence: Sequence) -> Record:
    out: Record = {"known_ids": sequence.known_ids.tolist()}
    for field in dataclasses.fields(sequence):
        value = getattr(sequence, field.name)
        if field.name not in _LINKS:
            out[field.name] = value.hex() if isinstance(value, bytes) else getattr(value, "value", value)
    return out


def _fill_sequence(sequence: Sequence, record: Mapping[str, Any]) -> None:
    values = {**record, "phase": Phase(record["phase"]), "head": bytes.fromhex(record["head"])}
    known = values.pop("known_ids")
    sequence.token_ids[: len(known)] = known
    for name, value in values.items():
        setattr(sequence, name, value)


def _logprobs_from(record: Mapping[str, Any]) -> TokenLogprobs:
    return TokenLogprobs(Logprob(**record["chosen"]), tuple(Logprob(**entry) for entry in record["top"]))
