"""What goes between the engine and the runner: rows to begin and to settle, what lanes got. Host values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from pagedjax.pages import NULL_PAGE
from pagedjax.runner.decode import DecodeReport
from pagedjax.runner.lifecycle import SettleReport
from pagedjax.runner.state import RowStatus
from pagedjax.sampling import RowSampling, SampleOutput


@dataclasses.dataclass(frozen=True)
class NewRow:
    """A sequence that gets row `row`, and `num_reserved` pages in one piece where pages are reserved at admission."""

    row: int
    token_ids: Sequence[int] | np.ndarray
    prompt_len: int
    max_tokens: int
    match_tokens: int
    namespace: int
    sampling: RowSampling
    uses_counts: bool
    num_reserved: int = 0


@dataclasses.dataclass(frozen=True)
class ForkedRow:
    """A sequence that begins as a copy of the row `source`; see `fork.Fork`. `hidden_index`: where in the hidden states of
    the last mixed step its next token is sampled from; None where it is decoded like any other."""

    row: int
    source: int
    num_tokens: int
    num_computed: int
    prompt_len: int
    max_tokens: int
    sampling: RowSampling
    uses_counts: bool
    hidden_index: int | None = None


@dataclasses.dataclass(frozen=True)
class Settlement:
    """What becomes of a row: publish the pages of its first `length` tokens (0: none), release it or keep it."""

    row: int
    length: int
    namespace: int
    release: bool


@dataclasses.dataclass(frozen=True)
class PublishedRow:
    """What a settlement made of one row: entry `index` of a report that is still on the device."""

    report: SettleReport
    index: int

    def pages(self) -> list[tuple[int, int, int, int]]:
        """(group, logical page, physical page, its generation) of the row's leading pages that are in the prefix index, as
        far as the row has not given them back."""
        num = int(np.asarray(self.report.num_published)[self.index])
        # The whole arrays: to slice them on the device would be programs of their own.
        pages = np.asarray(self.report.pages)[:, self.index, :num]
        generations = np.asarray(self.report.generations)[:, self.index, :num]
        group, column = np.nonzero(pages != NULL_PAGE)
        found = (group, column, pages[group, column], generations[group, column])
        return list(zip(*(values.tolist() for values in found), strict=True))


@dataclasses.dataclass(frozen=True)
class LaneResult:
    """What one lane got: new tokens, and what its row is now. `samples` has a leading axis over the tokens."""

    row: int
    status: RowStatus
    ok: bool
    samples: SampleOutput


@dataclasses.dataclass(frozen=True)
class Flight:
    """A decode loop that was dispatched and not yet read."""

    rows: tuple[int, ...]
    num_lanes: int
    max_steps: int
    dispatch: int
    started: float
    report: DecodeReport
