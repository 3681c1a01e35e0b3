"""Address translation at the host boundary, with errors instead of clamped indices; kernels do their own look-up."""

from __future__ import annotations

import numpy as np

from pagedjax.pages.state import NULL_PAGE, Pages


def _index(name: str, value: int, limit: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ValueError(f"{name}: must be an integer, got {value!r}")
    if not 0 <= value < limit:
        raise ValueError(f"{name}: must be in [0, {limit}), got {value}")
    return int(value)


def row_pages(pages: Pages, row: int, group: int = 0) -> list[int]:
    """Physical pages of a row, in logical order; empty for a row that holds nothing.

    Raises:
      ValueError: no such row or group.
    """
    row = _index("row", row, pages.max_rows)
    group = _index("group", group, pages.num_groups)
    return [int(page) for page in np.asarray(pages.table[group, row])[: int(pages.num_pages[row])]]


def physical_page(pages: Pages, row: int, logical: int, group: int = 0) -> int:
    """The physical page behind a row's logical page.

    Raises:
      ValueError: no such row or group, a row that holds no pages (an unknown sequence), a logical page beyond its end.
    """
    mapped = row_pages(pages, row, group)
    if not mapped:
        raise ValueError(f"row: {row} holds no sequence")
    page = mapped[_index("logical", logical, len(mapped))]
    if page == NULL_PAGE:
        raise ValueError(f"logical: page {logical} of row {row} was given back")
    return page


def physical_slot(pages: Pages, row: int, token: int, group: int = 0) -> int:
    """Physical address, in slots, of a row's token: page x S + offset. A Python integer, so it cannot overflow.

    Raises:
      ValueError: as `physical_page`, and a token beyond the row's pages.
    """
    mapped = len(row_pages(pages, row, group))
    if mapped:
        _index("token", token, mapped * pages.page_size)
    logical, offset = divmod(token, pages.page_size)
    return physical_page(pages, row, logical, group) * pages.page_size + offset
