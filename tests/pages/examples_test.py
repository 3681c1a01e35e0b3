"""Worked examples: the paper's figures 6 to 9, shared prompts, exhaustion, isolation of namespaces, recycled pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import pages as verbs
from pagedjax.pages import NULL_PAGE, check, init_pages, physical_page, row_pages
from tests.pages.small import (
    ALLOC,
    COW,
    COW_NEED,
    EMPTY,
    MATCH,
    OTHER,
    PUBLISH,
    REMAP,
    TEXT,
    N,
    P,
    R,
    S,
    alloc,
    counts,
    cow,
    match,
    pad,
    pages_in_order,
    pin,
    publish,
    ref_counts,
    remap,
    sound,
    unpin,
)
from tests.pages.world import ints

pytestmark = pytest.mark.smoke


def test_figures_6_and_7_two_requests_take_pages_on_demand():
    pages = pages_in_order([7, 1, 5, 2, 3])
    pages, _ = alloc(pages, [0], [2])  # a prompt of 7 tokens in pages of 4
    assert row_pages(pages, 0) == [7, 1]
    pages, _ = alloc(pages, [1], [2])  # the second request
    assert row_pages(pages, 1) == [5, 2]
    pages, _ = alloc(pages, [0], [0])  # token 8 fills page 1: nothing to take
    assert row_pages(pages, 0) == [7, 1]
    pages, _ = alloc(pages, [0], [1])  # the next one begins a page
    assert row_pages(pages, 0) == [7, 1, 3]
    assert sound(pages)


@pytest.mark.parametrize("together", [False, True])
def test_figure_8_two_samples_share_until_one_writes(together):
    pages = pages_in_order([7, 1, 3])
    pages, _ = alloc(pages, [0], [2])
    pages, _ = remap(pages, [1], [0])
    assert row_pages(pages, 0) == row_pages(pages, 1) == [7, 1]
    assert ref_counts(pages, 7, 1) == [2, 2]
    if together:
        assert COW_NEED(pages, pad([0, 1], R), pad([1, 1])).tolist() == [1, 0, 0, 0]
        pages, copies, ok = cow(pages, [0, 1], [1, 1])
        assert ok == [True, True]
    else:
        pages, copies, _ = cow(pages, [0], [1])
        pages, more, _ = cow(pages, [1], [1])  # by now the only holder: in place
        assert more == []
    assert copies == [[1, 3]]
    assert row_pages(pages, 0) == [7, 3]
    assert row_pages(pages, 1) == [7, 1]
    assert ref_counts(pages, 7, 1, 3) == [2, 1, 1]
    assert sound(pages)


def test_figure_9_beams_drop_and_share_pages():
    # The figure's block 0 is our page 13, as page 0 is reserved.
    pages = pages_in_order([13, 1, 3, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    pages, _ = alloc(pages, [0], [1])
    pages, _ = remap(pages, [3], [0])
    pages, _ = alloc(pages, [0], [2])
    pages, _ = remap(pages, [1, 2], [0, 0])
    pages, _ = alloc(pages, [3], [2])
    pages, _ = alloc(pages, [0, 1, 2, 3], [1, 1, 1, 1])
    assert [row_pages(pages, r) for r in range(4)] == [[13, 1, 3, 5], [13, 1, 3, 6], [13, 1, 3, 7], [13, 2, 4, 8]]
    pages, freed = remap(pages, [0, 1, 2, 3], [1, 1, 2, 2])
    assert freed == 4
    assert ref_counts(pages, 2, 4, 5, 8) == [0, 0, 0, 0]
    assert ref_counts(pages, 13, 1, 3, 6, 7) == [4, 4, 4, 2, 2]
    pages, ok = alloc(pages, [0, 1, 2, 3], [1, 1, 1, 1])
    assert all(ok)
    # The figure takes 9 to 12; here what was just freed without content is taken first.
    assert {row_pages(pages, r)[-1] for r in range(4)} == {2, 4, 5, 8}
    assert sound(pages)


def test_a_hundred_equal_prompts_hold_the_prefix_once():
    """2,000 common tokens and 16 of their own: computed a hundred times, they end up as one copy that others find."""
    prefix, own, num_rows = 125, 1, 100
    pages = init_pages(
        num_pages=1 + num_rows * (prefix + own),
        page_size=16,
        max_rows=num_rows,
        max_pages_per_row=prefix + own,
        secret=(1, 2),
    )
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    tokens = np.tile(np.arange((prefix + own) * 16, dtype=np.int32), (num_rows, 1))
    tokens[:, -1] = np.arange(num_rows)
    tokens, lengths = jnp.asarray(tokens), jnp.full(num_rows, (prefix + own) * 16, jnp.int32)
    zeros = jnp.zeros(num_rows, jnp.int32)
    pages, found = MATCH(pages, rows, tokens, lengths, zeros)
    assert not found.any()
    pages, ok = ALLOC(pages, rows, jnp.full(num_rows, prefix + own, jnp.int32))
    assert ok.all()
    assert pages.num_unowned == 0
    pages, published = PUBLISH(pages, rows, tokens, lengths, zeros)
    assert (published == prefix + own).all()
    assert counts(pages)["shared"] == prefix
    assert counts(pages)["active"] == num_rows * own
    assert len(np.unique(pages.table[0, :num_rows, :prefix])) == prefix
    assert check(pages) == []
    pages, _ = REMAP(pages, rows, jnp.full_like(rows, num_rows))
    assert counts(pages)["cached"] == prefix + num_rows * own
    pages, found = MATCH(pages, rows, tokens, lengths, zeros)  # the second batch computes its tails alone
    assert (found == prefix).all()
    assert pages.total_pages - 1 - pages.num_unowned == prefix
    assert check(pages) == []


@pytest.mark.parametrize(("length", "found"), [(8, 1), (9, 2), (4, 0), (1, 0), (0, 0), (12, 2)])
def test_a_hit_never_covers_the_last_token(length, found):
    pages, _ = alloc(pages_in_order(), [0], [2])
    pages, count = publish(pages, [0], [TEXT], [8], [0])
    assert count == [2]
    # Twice in one call: both rows get the same pages, counted twice.
    pages, matched = match(pages, [1, 2], [TEXT, TEXT], [length, length], [0, 0])
    assert matched == [found, found]
    assert row_pages(pages, 1) == row_pages(pages, 2) == row_pages(pages, 0)[:found]
    assert sound(pages)


def test_namespaces_and_pasts_keep_pages_apart():
    pages, _ = alloc(pages_in_order(), [0], [3])
    pages, _ = publish(pages, [0], [TEXT], [12], [7])
    for namespace, found in ((0, 0), (8, 0), (7, 2)):
        pages, matched = match(pages, [1], [TEXT], [12], [namespace])
        assert matched == [found]
        pages, _ = remap(pages, [1], [EMPTY])
    # The same second page behind another first page is another page.
    other = [31, *TEXT[1:]]
    pages, _ = alloc(pages, [2], [2])
    pages, _ = publish(pages, [2], [other], [8], [7])
    pages, _ = match(pages, [1, 3], [TEXT, other], [12, 12], [7, 7])
    assert row_pages(pages, 1) == row_pages(pages, 0)[:2]
    assert row_pages(pages, 3) == row_pages(pages, 2)
    assert set(row_pages(pages, 1)).isdisjoint(row_pages(pages, 3))
    assert sound(pages)


def test_a_reused_page_keeps_no_old_content():
    """Shared, freed once for each holder, taken for another prompt: its count reaches 0 once, the old prompt misses."""
    pages, _ = alloc(pages_in_order(usable=3), [0], [3])
    pages, _ = publish(pages, [0], [TEXT], [12], [0])
    pages, _ = remap(pages, [1, 2], [0, 0])
    freed = []
    for row in (0, 2, 1):
        pages, count = remap(pages, [row], [EMPTY])
        freed.append(count)
    assert freed == [0, 0, 3]
    assert counts(pages)["cached"] == 3
    pages, _ = alloc(pages, [3], [1])
    assert sound(pages, usable=3)
    pages, matched = match(pages, [0], [TEXT], [32], [0])
    assert matched == [2]  # the chain's tail was taken first
    pages, _ = remap(pages, [0, 3], [EMPTY, EMPTY])
    pages, _ = alloc(pages, [3], [3])
    pages, _ = publish(pages, [3], [OTHER], [12], [0])
    pages, matched = match(pages, [0, 1], [TEXT, OTHER], [32, 32], [0, 0])
    assert matched == [0, 3]
    assert sound(pages, usable=3)


def test_an_orphan_is_out_of_reach():
    """The middle page of a chain is recycled under a pinned end: the end is still published, and must not be found."""
    pages, _ = alloc(pages_in_order(usable=3), [0], [3])
    pages, _ = publish(pages, [0], [TEXT], [12], [0])
    first, middle, end = row_pages(pages, 0)
    pages = pin(pages, [end])
    pages, _ = remap(pages, [0], [EMPTY])
    assert counts(pages) == {"free": 0, "active": 0, "shared": 0, "cached": 2, "pending": 1 + N - 4}
    pages, _ = alloc(pages, [1], [1])
    assert row_pages(pages, 1) == [middle]
    pages = unpin(pages, [end])
    assert pages.parent[end] == middle
    pages, matched = match(pages, [0], [TEXT], [32], [0])
    assert matched == [1]
    assert row_pages(pages, 0) == [first]
    assert sound(pages, usable=3)


def test_exhaustion_in_mid_batch_leaves_the_rest_untouched():
    pages, ok = alloc(pages_in_order(usable=7), [2, 0, 3, 1], [3, 4, 1, 0])
    assert ok == [True, True, False, False]  # need 0 after a failure is a failure too
    assert [len(row_pages(pages, r)) for r in range(4)] == [4, 0, 3, 0]
    assert pages.num_unowned == 0
    pages, _ = remap(pages, [1], [0])
    before = jax.tree.map(np.asarray, pages)
    pages, copies, ok = cow(pages, [0, 1], [3, 3])
    assert ok == [False, False]
    assert copies == []
    pages, ok = alloc(pages, [3], [1])
    assert ok == [False]
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, pages))
    assert sound(pages, usable=7)


@pytest.mark.parametrize("need", [2**31 - 1, 2**30, 9, -1])
def test_absurd_needs_fail_without_overflow(need):
    pages, ok = alloc(pages_in_order(), [0, 1, 2, 3], [1, need, need, 1])
    assert ok == [True, False, False, False]
    assert sound(pages)


def test_a_static_bound_limits_what_one_call_takes():
    bounded = jax.jit(verbs.alloc, static_argnames="max_total")
    pages, ok = bounded(pages_in_order(), ints([0, R, 1, 2]), ints([2, 9, 1, 1]), max_total=3)
    assert ok.tolist() == [True, True, True, False]
    assert sound(pages)


@pytest.mark.parametrize("num_rows", [4, 300])
def test_the_last_of_all_writers_keeps_the_page(num_rows):
    """With few writers they are compared in pairs, with many sorted."""
    total = 1024 if num_rows > R else N
    pages = init_pages(num_pages=total, page_size=S, max_rows=num_rows, max_pages_per_row=P, secret=(1, 2))
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    pages, _ = ALLOC(pages, rows, 2 * (rows == 0).astype(jnp.int32))
    pages, _ = REMAP(pages, rows, jnp.zeros_like(rows))
    logical = jnp.ones_like(rows)
    assert COW_NEED(pages, rows, logical).tolist() == [1] * (num_rows - 1) + [0]
    pages, copies, ok = COW(pages, rows, logical)
    assert ok.all()
    assert int((copies[:, 1] < total).sum()) == num_rows - 1
    assert len({physical_page(pages, r, 1) for r in range(num_rows)}) == num_rows
    assert physical_page(pages, num_rows - 1, 1) == 2
    assert check(pages) == []


def test_a_pinned_page_is_copied_by_its_last_writer_too():
    pages, _ = alloc(pages_in_order(), [0], [1])
    pages = pin(pages, [1])
    pages, copies, _ = cow(pages, [0], [0])
    assert copies == [[1, 2]]
    assert counts(pages)["pending"] == 1
    assert sound(pages, pins=[1])
    pages = unpin(pages, [1, NULL_PAGE, N])
    assert counts(pages)["pending"] == 0
    assert sound(pages)


def test_least_recently_released_content_goes_first():
    pages = pages_in_order(usable=5)
    contents = [[i] * P * S for i in range(3)]
    pages, _ = alloc(pages, [0, 1, 2], [1, 1, 1])
    pages, _ = publish(pages, [0, 1, 2], contents, [4, 4, 4], [0, 0, 0])
    for row in (1, 2, 0):
        pages, _ = remap(pages, [row], [EMPTY])
    pages, found = match(pages, [3], [contents[1]], [5], [0])  # a hit makes it the youngest once released
    assert found == [1]
    pages, _ = remap(pages, [3], [EMPTY])
    # Two free pages, then content 2, then 0, then 1.
    for more, alive in ((2, [1, 1, 1]), (1, [1, 1, 0]), (1, [0, 1, 0]), (1, [0, 0, 0])):
        pages, _ = alloc(pages, [0], [more])
        hit, found = match(pages, [1, 2, 3], contents, [5, 5, 5], [0, 0, 0])
        assert found == alive
        assert sound(hit, usable=5)


@pytest.mark.parametrize(
    "bad", [{"num_pages": 1}, {"page_size": 0}, {"max_rows": 0}, {"hash_bits": 33}, {"num_buckets": 3}, {"num_ways": 0}]
)
def test_sizes_are_checked(bad):
    sizes = {"num_pages": 8, "page_size": 4, "max_rows": 2, "max_pages_per_row": 2} | bad
    with pytest.raises(ValueError, match=next(iter(bad))):
        init_pages(**sizes)
