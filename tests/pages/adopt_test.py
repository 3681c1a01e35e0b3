"""Hits at token grain: worked examples. The long random runs are in verbs_test."""

import pytest

from pagedjax.pages import row_pages
from tests.pages.small import (
    EMPTY,
    TEXT,
    P,
    R,
    S,
    adopt,
    alloc,
    counts,
    match,
    pages_in_order,
    publish,
    remap,
    sound,
)


def ended(length: int, text=TEXT, namespace: int = 0):
    """Pages after a row with `length` tokens of `text` has ended."""
    pages, _ = alloc(pages_in_order(), [0], [-(-length // S)])
    pages, _ = publish(pages, [0], [text], [length], [namespace], [True])
    pages, _ = remap(pages, [0], [EMPTY])
    assert sound(pages)
    return pages


def full(text):
    """As long as a row of tokens must be."""
    return [*text, *[0] * (P * S - len(text))]


def hit(pages, text, length, row=1, namespace=0):
    pages, found = match(pages, [row], [text], [length], [namespace])
    pages, copies, more = adopt(pages, [row], [text], [length], [namespace])
    assert sound(pages)
    return pages, found[0] * S + more[0], copies


@pytest.mark.parametrize("length", [1, 2, S - 1, S, S + 1, 2 * S, 2 * S + 3])
def test_all_that_was_known_is_found_again_but_the_last_token(length):
    _, found, copies = hit(ended(length), TEXT, length)
    assert found == length - 1
    assert len(copies) == int((length - 1) % S > 0)
    _, found, _ = hit(ended(length), TEXT, 3 * S)
    assert found == length  # and the next turn of a conversation finds all of it


def test_part_of_a_full_page():
    text = [*TEXT[: S + 2], 99, *TEXT[S + 3 :]]
    pages, found, copies = hit(ended(2 * S), text, 3 * S)
    assert found == S + 2
    assert copies == [[2, 3]]
    assert row_pages(pages, 1) == [1, 3]
    assert counts(pages)["cached"] == 1  # the source keeps its content
    pages, found, copies = hit(pages, TEXT, 3 * S, row=2)
    assert (found, copies) == (2 * S, [])


def test_the_page_that_agrees_most_is_taken():
    pages = ended(S)
    for last in (3, 1, 2):
        pages, _ = alloc(pages, [0], [1])
        pages, _ = publish(pages, [0], [full([*TEXT[:last], 77, 77, 77, 77])], [S], [0], [True])
        pages, _ = remap(pages, [0], [EMPTY])
    text = full([*TEXT[:2], 77, 5, 5])
    _, found, _ = hit(pages, text, S + 1)
    assert found == 3


def test_an_unfilled_page_is_published_only_if_it_is_news_and_nobody_else_holds_it():
    pages = ended(S + 2)
    pages, _ = alloc(pages, [0], [2])
    pages, _ = publish(pages, [0], [TEXT], [S + 1], [0], [True])  # begins as the longer one that is there
    pages, _ = remap(pages, [0], [EMPTY])
    assert counts(pages)["cached"] == 2
    other = [9, *TEXT[1:]]
    pages, _ = alloc(pages, [0], [1])
    pages, _ = remap(pages, [1], [0])
    pages, _ = publish(pages, [0], [other], [2], [0], [True])  # row 1 still writes into it
    pages, _ = remap(pages, [0], [EMPTY])
    assert hit(pages, other, S, row=2)[1] == 0


def test_namespaces_keep_parts_apart_too():
    pages = ended(S + 2, namespace=3)
    assert hit(pages, TEXT, 3 * S, namespace=0)[1] == 0
    assert hit(pages, TEXT, 3 * S, namespace=3)[1] == S + 2


def test_no_page_left_for_the_copy():
    pages = ended(3)
    pages, ok = alloc(pages, [2], [8])
    pages, ok = alloc(pages, [3], [6])
    assert ok == [True]
    assert counts(pages)["cached"] == 1  # the source is all that is left
    pages, found, copies = hit(pages, TEXT, S)
    assert (found, copies, counts(pages)["cached"]) == (0, [], 1)


def test_two_rows_take_copies_of_one_page():
    pages = ended(S + 2)
    rows, text = [1, 2], [TEXT, TEXT]
    pages, _ = match(pages, rows, text, [9, 9], [0, 0])
    pages, copies, more = adopt(pages, rows, text, [9, 9], [0, 0])
    assert more == [2, 2]
    assert [source for source, _ in copies] == [2, 2]
    assert len({target for _, target in copies}) == 2
    assert sound(pages)


def test_a_row_at_its_end_gets_no_more():
    pages = ended(3)
    pages, found, copies = hit(pages, TEXT, 1)
    assert (found, copies) == (0, [])
    assert row_pages(pages, R - 1) == []
