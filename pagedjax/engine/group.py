"""A request in flight: its n sequences, their text, and what of it has not been reported yet."""

from __future__ import annotations

import dataclasses

import numpy as np

from pagedjax.engine.stops import TextStream
from pagedjax.sampling import LogprobsOutput, RowSampling, SampleOutput, host_logprobs
from pagedjax.scheduler import Sequence
from pagedjax.types import CompletionOutput, FinishReason, Request, RequestOutput, TokenLogprobs


@dataclasses.dataclass(eq=False)
class Continuation:
    """One sequence with its text, and the news of it since the last report."""

    sequence: Sequence
    sampling: RowSampling
    text: TextStream | None
    new_text: str = ""
    new_ids: list[int] = dataclasses.field(default_factory=list)
    new_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    reported_end: bool = False
    counts: bool = True  # among the sequences that ended; beams that are not part of the answer do not

    def take(self, ids: list[int], samples: SampleOutput) -> None:
        """Hold ids, and their log-probabilities where asked for, until the next report."""
        self.new_ids += ids
        num = self.sequence.request.sampling.logprobs
        if num is not None:
            self.new_logprobs += [_entry(token, samples, i, num) for i, token in enumerate(ids)]

    def drain(self) -> CompletionOutput | None:
        """The news; None where there are none."""
        ended = self.finish_reason is not None and not self.reported_end
        if not (self.new_ids or self.new_text or ended):
            return None
        wants_logprobs = self.sequence.request.sampling.logprobs is not None
        out = CompletionOutput(
            index=self.sequence.index,
            text=self.new_text,
            token_ids=self.new_ids,
            logprobs=self.new_logprobs if wants_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        self.new_text, self.new_ids, self.new_logprobs = "", [], []
        self.reported_end = ended or self.reported_end
        return out


@dataclasses.dataclass(eq=False)
class RequestGroup:
    """All continuations of one request."""

    request: Request
    continuations: list[Continuation]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] = dataclasses.field(default_factory=list)

    @property
    def finished(self) -> bool:
        return all(c.finish_reason is not None for c in self.continuations)

    def end(self, reason: FinishReason) -> list[Continuation]:
        """End the continuations that have not ended, keeping what they have generated; returns them."""
        ended = [c for c in self.continuations if c.finish_reason is None]
        for continuation in ended:
            continuation.finish_reason = reason
            if continuation.text is not None:
                continuation.new_text += continuation.text.finish()
        return ended

    def take_prompt_logprobs(self, start: int, out: LogprobsOutput, next_ids: np.ndarray) -> None:
        """Log-probabilities of prompt tokens start + 1 and on; what is known already (after a preemption) is skipped."""
        num = self.request.sampling.prompt_logprobs
        assert num is not None
        if not self.prompt_logprobs:
            self.prompt_logprobs.append(None)
        for i, token in enumerate(next_ids.tolist()):
            if start + 1 + i == len(self.prompt_logprobs):
                self.prompt_logprobs.append(_entry(token, out, i, num))

    def drain(self) -> RequestOutput | None:
        """The news of all continuations; None where there are none."""
        outputs = [out for c in self.continuations if (out := c.drain()) is not None]
        if not outputs:
            return None
        wants = self.request.sampling.prompt_logprobs is not None
        return RequestOutput(
            request_id=self.request.request_id,
            prompt_ids=self.request.prompt_ids,
            prompt=self.request.prompt,
            outputs=outputs,
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            prompt_logprobs=(self.prompt_logprobs or [None]) if wants else None,
            num_generated_tokens=sum(c.sequence.num_generated for c in self.continuations),
        )


def _entry(token: int, out: SampleOutput | LogprobsOutput, i: int, num: int) -> TokenLogprobs:
    """Entry i of a device report for the outside."""
    return host_logprobs(
        token,
        float(out.logprobs[i]),
        int(out.ranks[i]),
        np.asarray(out.top_ids[i]),
        np.asarray(out.top_logprobs[i]),
        num,
    )
