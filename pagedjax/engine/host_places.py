"""Which pages a row needs where its layer groups see windows, and how far given pages reach. Plain arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from pagedjax.pages.capacity import Footprint


class Place(NamedTuple):
    """One page of a sequence: its layer group and its logical page."""

    group: int
    column: int


def needed(footprint: Footprint, num_computed: int, start: int = 0) -> list[Place]:
    """Places from column `start` on that a row with num_computed tokens needs, unfilled ones too, column by column."""
    first = footprint.first(num_computed)
    return [
        Place(group, column)
        for column in range(start, footprint.logical(num_computed))
        for group, begin in enumerate(first)
        if column >= begin
    ]


def reaches(footprint: Footprint, is_there: Callable[[Place], bool], start: int, end: int) -> Iterator[int]:
    """Columns, the last first, up to which a row that has `start` columns can be filled with full pages that are there.

    Windows make gaps harmless: column m can be reached if every group has what a token at its beginning, or a later
    one, sees between `start` and m.

    Args:
      footprint: page size and windows.
      is_there: whether a place's content can be had.
      start: columns that the row has, with what a token after them sees.
      end: no column after this.
    """
    gaps = [start] * footprint.num_groups  # by group, the column after its last gap so far
    found: list[int] = []
    for column in range(start, end):
        for group, window in enumerate(footprint.windows):
            if not is_there(Place(group, column)):
                gaps[group] = column + 1
                if not window:  # it sees the gap for ever
                    return reversed(found)
        first = footprint.first((column + 1) * footprint.page_size)
        if all(gap <= max(start, begin) for gap, begin in zip(gaps, first, strict=True)):
            found.append(column + 1)
    return reversed(found)
