"""A request decoded by beam search: its beams are rows over shared pages, reordered on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from pagedjax.engine.beam import BeamSearch, Hypothesis, num_candidates
from pagedjax.engine.forks import forked_row
from pagedjax.engine.group import Continuation, RequestGroup
from pagedjax.engine.stats import Counters
from pagedjax.errors import InvalidRequestError
from pagedjax.pages.capacity import Footprint
from pagedjax.runner import Runner
from pagedjax.sampling import SampleOutput
from pagedjax.scheduler import Scheduler, Sequence
from pagedjax.types import MAX_LOGPROBS, CompletionOutput, FinishReason, Request, RequestOutput


@dataclasses.dataclass(eq=False)
class BeamGroup(RequestGroup):
    """All beams of one request. A beam that has its candidates for the next token is held until all have theirs.

    The first beam computes the prompt; the others are forked from it. Nothing is reported before the end.
    """

    search: BeamSearch | None = None
    candidates: dict[Sequence, tuple[np.ndarray, np.ndarray]] = dataclasses.field(default_factory=dict)
    reported: bool = False
    cut_short: list[Hypothesis] = dataclasses.field(default_factory=list)

    @property
    def beams(self) -> list[Sequence]:
        return [c.sequence for c in self.continuations]

    def take(self, sequence: Sequence, samples: SampleOutput) -> None:
        """Hold a beam with the likeliest next tokens that the device found for it."""
        sequence.held = True
        self.candidates[sequence] = (np.asarray(samples.top_ids[0]), np.asarray(samples.top_logprobs[0]))

    def displace(self) -> None:
        """Its rows are gone: the candidates will be computed again."""
        self.candidates.clear()

    def record(self) -> dict[str, Any]:
        """The search and what beams hold, as JSON values."""
        assert self.search is not None
        held = {str(s.index): [ids.tolist(), logprobs.tolist()] for s, (ids, logprobs) in self.candidates.items()}
        return {"search": self.search.record(), "candidates": held, "reported": self.reported}

    def load(self, record: Mapping[str, Any]) -> None:
        """Go on from a `record`."""
        assert self.search is not None
        self.search.load(record["search"])
        self.candidates = {
            self.beams[int(i)]: (np.array(ids, np.int32), np.array(logprobs, np.float32))
            for i, (ids, logprobs) in record["candidates"].items()
        }
        self.reported = record["reported"]

    def end(self, reason: FinishReason) -> list[Continuation]:
        """See `RequestGroup`. The beams as they stand are hypotheses too."""
        if self.finished:
            return []
        assert self.search is not None
        self.cut_short = self.search.open_hypotheses(self._generated)
        self._close([reason] * self.request.sampling.n)
        return self.continuations

    def _close(self, reasons: list[FinishReason]) -> None:
        """Every beam ends; only the answer's count as sequences that ended."""
        for i, continuation in enumerate(self.continuations):
            continuation.finish_reason = reasons[min(i, len(reasons) - 1)]
            continuation.counts = i < self.request.sampling.n

    @property
    def _generated(self) -> list[tuple[int, ...]]:
        return [tuple(s.known_ids[s.prompt_len :].tolist()) for s in self.beams]

    @property
    def best(self) -> list[Hypothesis]:
        """The answer, best first; nothing where the request was aborted."""
        assert self.search is not None
        aborted = self.continuations[0].finish_reason is FinishReason.ABORT
        found = sorted([*self.search.finished, *self.cut_short], key=lambda h: -h.score)
        return [] if aborted else found[: self.request.sampling.n]

    @property
    def is_ready(self) -> bool:
        assert self.search is not None
        return len(self.candidates) == (len(self.continuations) if self.search.length else 1)

    def advance(self, scheduler: Scheduler, runner: Runner, counters: Counters) -> list[Continuation]:
        """One token further; returns the continuations to let go of, all of them at the end of the search."""
        assert self.search is not None
        beams, first = self.beams, self.search.length == 0
        # Before the first token there is only one beam; the search itself looks at no other.
        found = [self.candidates[beams[0] if first else s] for s in beams]
        self.candidates.clear()
        move = self.search.advance(
            self._generated,
            np.stack([ids for ids, _ in found]),
            np.stack([logprobs for _, logprobs in found]),
        )
        if move is None:
            self._close([_reason(hypothesis) for hypothesis in self.best])
            return self.continuations
        if first:
            counters.forks += self._fork_first(scheduler, runner)
        before = [(s.known_ids.copy(), s.row, s.num_published) for s in beams]
        moves = []
        for sequence, source, token in zip(beams, move.sources, move.tokens, strict=True):
            ids, row, published = before[source]
            sequence.continue_as(ids, token, published)
            if sequence.row is not None:
                assert row is not None
                moves.append((sequence.row, row, len(ids), token))
        runner.reorder(moves)
        return []

    def _fork_first(self, scheduler: Scheduler, runner: Runner) -> int:
        """Rows for the other beams, as far as there is room; the rest come through the prefix cache. Returns how many."""
        source, rows = self.beams[0], []
        for continuation in self.continuations[1:]:
            row = scheduler.accept_fork(continuation.sequence, source.prompt_len, runner.num_unowned)
            if row is None:
                break
            rows.append(forked_row(continuation, source, row, None))
        if rows:
            runner.fork(rows)
        return len(rows)

    def drain(self) -> RequestOutput | None:
        """The best hypotheses, once the search is over."""
        if not self.finished or self.reported:
            return None
        self.reported = True
        best = self.best
        outputs = [self._output(i, h) for i, h in enumerate(best)]
        if self.continuations[0].finish_reason is FinishReason.DEADLINE:
            outputs += [CompletionOutput(i, "", []) for i in range(len(best), self.request.sampling.n)]
            for output in outputs:
                output.finish_reason = FinishReason.DEADLINE
        return RequestOutput(
            request_id=self.request.request_id,
            prompt_ids=self.request.prompt_ids,
            prompt=self.request.prompt,
            outputs=outputs,
            finished=True,
            num_cached_tokens=self.num_cached_tokens,
            num_generated_tokens=sum(len(h.token_ids) for h in best),
        )

    def _output(self, index: int, hypothesis: Hypothesis) -> CompletionOutput:
        ids, stream = list(hypothesis.token_ids), self.continuations[index].text
        text = ""
        if stream is not None:
            text = stream.append(ids[:-1] if hypothesis.ended_by_id else ids).text + stream.finish()
        return CompletionOutput(
            index, text, ids, finish_reason=_reason(hypothesis), cumulative_logprob=hypothesis.logprob
        )


def _reason(hypothesis: Hypothesis) -> FinishReason:
    return FinishReason.STOP if hypothesis.ended_by_id else FinishReason.LENGTH


def advance_beams(
    groups: Iterable[RequestGroup], scheduler: Scheduler, runner: Runner, counters: Counters
) -> list[Continuation]:
    """Searches whose beams all have their candidates go one token further; returns the continuations to let go of."""
    ended: list[Continuation] = []
    for group in groups:
        if isinstance(group, BeamGroup) and group.is_ready:
            over = group.advance(scheduler, runner, counters)
            if over:
                counters.generation_tokens += sum(len(h.token_ids) for h in group.best)
            ended += over
    return ended


def make_search(request: Request, eos_token_ids: tuple[int, ...], max_new: int) -> BeamSearch:
    """The search that a request asks for.

    Raises:
      InvalidRequestError: more beams than the candidates suffice for.
    """
    sampling = request.sampling
    end_ids = frozenset(() if sampling.ignore_eos else eos_token_ids)
    if num_candidates(sampling.beam_width, len(end_ids)) > MAX_LOGPROBS:
        most = MAX_LOGPROBS // num_candidates(1, len(end_ids))
        raise InvalidRequestError(
            "beam_width", f"at most {most} with the model's {len(end_ids)} end ids, got {sampling.beam_width}"
        )
    return BeamSearch(
        sampling.beam_width,
        end_ids,
        max_new,
        length_penalty=sampling.length_penalty,
        early_stopping=sampling.early_stopping,
    )


def check_beams_fit(
    group: RequestGroup, footprint: Footprint, *, max_num_seqs: int, num_pages: int, chunk: int
) -> None:
    """Raises InvalidRequestError where the beams could never run at once, each in pages of its own at worst, and computed
    again in chunks of `chunk` tokens; or may share no pages."""
    if not isinstance(group, BeamGroup):
        return
    width = len(group.continuations)
    if not footprint.allocation.is_paged:
        raise InvalidRequestError(
            "beam_width", f"beams share pages, which needs config.cache.allocation=paged; got {width}"
        )
    if width > max_num_seqs:
        raise InvalidRequestError("beam_width", f"at most scheduler.max_num_seqs = {max_num_seqs}, got {width}")
    longest = group.continuations[0].sequence.max_total
    pages = width * sum(footprint.most(longest, chunk))
    if pages > num_pages:
        fits = footprint.longest(num_pages // width, chunk, at_most=longest) - len(group.request.prompt_ids)
        advice = f"at most {fits} tokens fit after this prompt" if fits > 0 else "use fewer beams or a shorter prompt"
        raise InvalidRequestError(
            "max_tokens",
            f"{width} beams of up to {longest} tokens could need {pages} pages, there are {num_pages}; {advice}",
        )
