"""Which sequences begin as forks of others, and as what rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from pagedjax.engine.group import Continuation, RequestGroup
from pagedjax.errors import InvalidRequestError
from pagedjax.runner import ForkedRow, LaneResult
from pagedjax.sampling import uses_counts
from pagedjax.scheduler import Phase, Scheduler, Sequence
from pagedjax.types import Request, SamplingParams


def branch(
    group: RequestGroup | None, request_id: str, new_id: str, sampling: SamplingParams | None, index: int
) -> tuple[Sequence, Request]:
    """What `Engine.fork` branches off: the source, and the new request, whose prompt is all that the source knows.

    Raises:
      InvalidRequestError: no such request in flight, no such continuation, or it has ended.
    """
    if group is None:
        raise InvalidRequestError("request_id", f"{request_id!r} is not in flight")
    if not isinstance(new_id, str) or not new_id:
        raise InvalidRequestError("new_id", f"must be a text, got {new_id!r}")
    if sampling is not None and not isinstance(sampling, SamplingParams):
        raise InvalidRequestError("sampling", f"must be SamplingParams, got {sampling!r}")
    if not isinstance(index, int) or not 0 <= index < len(group.continuations):
        raise InvalidRequestError("index", f"must be in [0, {len(group.continuations)}), got {index!r}")
    if group.continuations[index].finish_reason is not None:
        raise InvalidRequestError("index", f"continuation {index} of {request_id!r} has ended")
    source = group.continuations[index].sequence
    request = dataclasses.replace(
        group.request,
        request_id=new_id,
        prompt_ids=tuple(source.known_ids.tolist()),
        prompt=None,
        sampling=dataclasses.replace(sampling or group.request.sampling, n=1),
    )
    return source, request


def completed_prompts(
    lanes: Iterable[tuple[Sequence, int]], results: Iterable[LaneResult]
) -> Iterator[tuple[Sequence, int]]:
    """Of a mixed step, the first continuations of several that have just got their first token: (sequence, where its last
    prompt token is in the hidden states of the step)."""
    end = 0
    for (sequence, q_len), result in zip(lanes, results, strict=True):
        end += q_len if result.ok else 0
        first = sequence.num_generated == 1 and len(result.samples.tokens) == 1
        if first and sequence.parent is None and sequence.request.sampling.n > 1:
            yield sequence, end - 1


def fork_continuations(
    group: RequestGroup, scheduler: Scheduler, num_unowned: int, hidden_index: int
) -> list[tuple[Continuation, ForkedRow]]:
    """Rows for a request's other continuations once the first has computed the prompt, as far as there is room.

    They share every page of the prompt, and sample their first token from the same hidden state. The rest come later,
    through the prefix cache.

    Args:
      hidden_index: where the last prompt token is in the hidden states of the step.
    """
    parent = group.continuations[0].sequence
    forked = []
    for continuation in group.continuations[1:]:
        sequence = continuation.sequence
        if sequence.row is not None or sequence.num_generated or continuation.finish_reason is not None:
            continue
        row = scheduler.accept_fork(sequence, parent.prompt_len, num_unowned)
        if row is None:
            break
        forked.append((continuation, forked_row(continuation, parent, row, hidden_index)))
    return forked


def fork_running(
    continuation: Continuation, source: Sequence, scheduler: Scheduler, num_unowned: int
) -> ForkedRow | None:
    """A row for a sequence that knows what the running `source` knows, sharing its pages; None where there is no room."""
    if source.phase is not Phase.DECODE:
        return None
    row = scheduler.accept_fork(continuation.sequence, source.num_computed, num_unowned)
    return None if row is None else forked_row(continuation, source, row, None)


def forked_row(continuation: Continuation, source: Sequence, row: int, hidden_index: int | None) -> ForkedRow:
    """The device's part of a fork: `continuation` gets `row`, which begins as the source's."""
    sequence = continuation.sequence
    assert source.row is not None
    return ForkedRow(
        row=row,
        source=source.row,
        num_tokens=sequence.num_tokens,
        num_computed=sequence.num_computed,
        prompt_len=sequence.prompt_len,
        max_tokens=sequence.max_total,
        sampling=continuation.sampling,
        uses_counts=uses_counts(sequence.request.sampling),
        hidden_index=hidden_index,
    )
