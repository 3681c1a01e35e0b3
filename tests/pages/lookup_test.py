"""Address translation at the host boundary."""

import pytest

from pagedjax.pages import alloc, init_pages, physical_page, physical_slot, row_pages
from pagedjax.pages.capacity import flat_offset
from tests.pages.world import ints


@pytest.fixture(scope="module")
def pages():
    pages = init_pages(num_pages=12, page_size=4, max_rows=3, max_pages_per_row=4, num_groups=2, secret=(1, 2))
    return alloc(pages, ints([1]), ints([2]))[0]


def test_translation(pages):
    assert row_pages(pages, 1) == [1, 2]
    assert row_pages(pages, 1, group=1) == [3, 4]
    assert row_pages(pages, 0) == []
    assert physical_page(pages, 1, 1, group=1) == 4
    assert [physical_slot(pages, 1, t) for t in (0, 3, 4, 7)] == [4, 7, 8, 11]
    assert physical_slot(pages, 1, 5, group=1) == 17


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda p: row_pages(p, 3), r"row: must be in \[0, 3\), got 3"),
        (lambda p: row_pages(p, -1), r"row: must be in \[0, 3\), got -1"),
        (lambda p: row_pages(p, 1, group=2), r"group: must be in \[0, 2\), got 2"),
        (lambda p: physical_page(p, 0, 0), "row: 0 holds no sequence"),
        (lambda p: physical_page(p, 1, 2), r"logical: must be in \[0, 2\), got 2"),
        (lambda p: physical_page(p, 1, True), "logical: must be an integer"),
        (lambda p: physical_slot(p, 1, 8), r"token: must be in \[0, 8\), got 8"),
        (lambda p: physical_slot(p, 1, -1), r"token: must be in \[0, 8\), got -1"),
        (lambda p: physical_slot(p, 2, 0), "row: 2 holds no sequence"),
        (lambda p: physical_slot(p, 1, 1.5), "token: must be an integer"),
    ],
)
def test_errors_name_argument_value_and_limit(pages, call, complaint):
    with pytest.raises(ValueError, match=complaint):
        call(pages)


def test_the_last_page_of_a_large_pool_has_an_offset_beyond_31_bits():
    offset = flat_offset(page=65_535, offset=15, page_size=16, num_kv_heads=32, head_dim=128)
    assert offset == (65_536 * 16 - 1) * 32 * 128 > 2**31
