"""Beam search over the rows of one request: which hypotheses go on, which have ended. Host side, plain numbers.

The rules are those of `transformers`' `generate(num_beams=...)`, so that the answers agree: of the best
max(2, 1 + number of end ids) x width continuations, those that end among the first `width` become finished hypotheses,
scored by (sum of log-probabilities) / (generated tokens ** length_penalty), and the best `width` that do not end go on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

_NONE = np.float32(-1e9)
"""Score of a beam that does not exist (all but the first begin so) and of a place no hypothesis has taken."""


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A continuation: generated ids, the end id included where one ended it.

    Attributes:
      score: what hypotheses are ranked by.
      logprob: sum of the tokens' log-probabilities, before the length penalty.
    """

    token_ids: tuple[int, ...]
    score: float
    logprob: float
    ended_by_id: bool


@dataclasses.dataclass(frozen=True)
class Move:
    """How the beams go on: beam i becomes a copy of beam sources[i] followed by tokens[i]."""

    sources: tuple[int, ...]
    tokens: tuple[int, ...]


class BeamSearch:
    """The state of one search.

    Args:
      width: beams.
      end_ids: ids that end a hypothesis.
      max_new: generated tokens at which a hypothesis ends whatever comes.
      length_penalty: exponent of the length by which a score is divided; above 0 favours long hypotheses.
      early_stopping: True ends as soon as `width` hypotheses have ended; False when the best open beam cannot beat the
        worst of them at its present length; "never" when it cannot at any length.
    """

    def __init__(
        self, width: int, end_ids: frozenset[int], max_new: int, *, length_penalty: float, early_stopping: bool | str
    ) -> None:
        self.width, self.end_ids, self.max_new = width, end_ids, max_new
        self.length_penalty, self.early_stopping = length_penalty, early_stopping
        self.num_candidates = num_candidates(width, len(end_ids))
        self.length = 0
        self.scores = np.full(width, _NONE, np.float32)
        self.scores[0] = 0
        self.finished: list[Hypothesis] = []
        self._improvable = True

    def advance(self, generated: list[tuple[int, ...]], top_ids: np.ndarray, top_logprobs: np.ndarray) -> Move | None:
        """Take one more token for every beam.

        Args:
          generated: ids that each beam has generated so far.
          top_ids: i32[width, K] the most likely next ids of each beam, K >= num_candidates.
          top_logprobs: f32[width, K].

        Returns:
          How to go on; None where the search is over.
        """
        totals = self.scores[:, None] + top_logprobs.astype(np.float32)
        beams, columns = np.unravel_index(_best(totals, top_ids, self.num_candidates), totals.shape)
        tokens, scores = top_ids[beams, columns], totals[beams, columns]
        self.length += 1
        by_id = np.isin(tokens, list(self.end_ids))
        ends = by_id | (self.length >= self.max_new)
        self._finish(generated, beams, tokens, scores, ends, by_id)
        going = np.flatnonzero(~ends)[: self.width]
        if not len(going):
            return None
        assert len(going) == self.width, "each beam has at most one candidate an end id"
        self.scores = scores[going]
        if self._is_over():
            return None
        return Move(tuple(int(b) for b in beams[going]), tuple(int(t) for t in tokens[going]))

    def record(self) -> dict[str, Any]:
        """Where the search stands, as JSON values."""
        return {
            "length": self.length,
            "scores": self.scores.tolist(),
            "finished": [dataclasses.asdict(h) for h in self.finished],
            "improvable": self._improvable,
        }

    def load(self, record: Mapping[str, Any]) -> None:
        """Go on from a `record`."""
        self.length, self._improvable = record["length"], record["improvable"]
        self.scores = np.array(record["scores"], np.float32)
        self.finished = [Hypothesis(**{**h, "token_ids": tuple(h["token_ids"])}) for h in record["finished"]]

    def open_hypotheses(self, generated: list[tuple[int, ...]]) -> list[Hypothesis]:
        """The beams as they stand, for a search that is cut short; none before the first token."""
        if not self.length:
            return []
        ranks = self.scores / np.float32(self.length**self.length_penalty)
        return [
            Hypothesis(ids, float(rank), float(score), ended_by_id=False)
            for ids, rank, score in zip(generated, ranks, self.scores, strict=True)
        ]

    def _finish(
        self,
        generated: list[tuple[int, ...]],
        beams: np.ndarray,
        tokens: np.ndarray,
        scores: np.ndarray,
        ends: np.ndarray,
        by_id: np.ndarray,
    ) -> None:
        """Keep the best `width` of the finished hypotheses and of those that end now."""
        full = len(self.finished) == self.width and self.early_stopping is True
        if full or not self._improvable:
            return
        for k in np.flatnonzero(ends[: self.width]):
            score = np.float32(scores[k]) / np.float32(self.length**self.length_penalty)
            ids = (*generated[beams[k]], int(tokens[k]))
            self.finished.append(Hypothesis(ids, float(score), float(scores[k]), bool(by_id[k])))
        self.finished.sort(key=lambda h: -h.score)
        del self.finished[self.width :]

    def _is_over(self) -> bool:
        full = len(self.finished) == self.width
        if full and self.early_stopping is True:
            return True
        if full:
            optimistic = self.early_stopping == "never" and self.length_penalty > 0
            length = self.max_new if optimistic else self.length
            best = self.scores[0] / np.float32(length**self.length_penalty)
            self._improvable = self._improvable and bool(best > self.finished[-1].score)
        return not self._improvable


def num_candidates(width: int, num_end_ids: int) -> int:
    """Continuations to look at so that `width` of them do not end."""
    return max(2, 1 + num_end_ids) * width


def _best(totals: np.ndarray, ids: np.ndarray, num: int) -> np.ndarray:
    """Flat indices of the `num` largest totals, best first; equal ones by beam, then by id."""
    beam = np.broadcast_to(np.arange(totals.shape[0])[:, None], totals.shape)
    return np.lexsort((ids.ravel(), beam.ravel(), -totals.ravel()))[:num]
