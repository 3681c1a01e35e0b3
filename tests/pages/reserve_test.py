"""Pages in one piece: reservation against a first-fit allocator over a list, and chunks that stay whole."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.pages import check, check_adjoining, reserve, stats
from pagedjax.pages.capacity import PAGED, Allocation, Footprint
from tests.pages.small import ALLOC, TEXT, N, P, R, S, alloc, pad, pages_in_order, publish, remap

WHOLE = Allocation(reserve="request")
RESERVE = jax.jit(reserve, donate_argnums=0)


def take(pages, rows, need, verb=RESERVE):
    pages, ok = verb(pages, pad(rows, R), pad(need))
    return pages, ok[: len(rows)].tolist()


class FirstFit:
    """Who owns each page, in a list."""

    def __init__(self):
        self.owner = [None] * N

    def take(self, row, need):
        for first in range(1, N - need + 1):
            if self.owner[first : first + need] == [None] * need:
                self.owner[first : first + need] = [row] * need
                return True
        return False

    def give(self, row):
        self.owner = [None if owner == row else owner for owner in self.owner]

    def table(self):
        return [[page for page in range(N) if self.owner[page] == row] for row in range(R)]


def table_of(pages):
    return [[page for page in row if page] for row in pages.table[0].tolist()]


def test_free_pages_are_not_room():
    """Ten of fifteen pages are free, and a row of six finds no gap: external fragmentation."""
    pages, ok = take(pages_in_order(), [0, 1, 2], [5, 5, 5])
    assert ok == [True] * 3
    pages, _ = remap(pages, [0, 2], [R, R])
    assert int(stats(pages).free) == 10
    pages, ok = take(pages, [0], [6])
    assert ok == [False]
    # The order is kept: who comes after the one without room waits too.
    pages, ok = take(pages, [0, 2, 3], [5, 6, 1])
    assert ok == [True, False, False]
    assert table_of(pages) == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [], []]
    assert check(pages) == check_adjoining(pages, WHOLE) == []


@pytest.mark.parametrize(("rows", "need", "why"), [([0], [1], "has pages"), ([1], [P + 1], "> P"), ([1], [-1], "< 0")])
def test_what_a_row_cannot_have(rows, need, why):
    pages, _ = take(pages_in_order(), [0], [2])
    before = table_of(pages)
    pages, ok = take(pages, rows, need)
    assert ok == [False], why
    assert table_of(pages) == before
    assert check(pages) == []


def test_cached_pages_are_taken_with_what_is_known_of_them():
    pages, _ = alloc(pages_in_order(), [0], [2])
    pages, _ = publish(pages, [0], [TEXT], [2 * S], [0])
    pages, _ = remap(pages, [0], [R])
    assert int(stats(pages).cached) == 2
    pages, ok = take(pages, [1, 2], [P, N - 1 - P])
    assert ok == [True, True]
    assert int(stats(pages).cached) == 0
    assert pages.parent.tolist() == [0] * N
    assert check(pages) == check_adjoining(pages, WHOLE) == []


def test_random_runs_agree_with_a_first_fit_allocator():
    rng = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")
    pages, slow, refusals = pages_in_order(), FirstFit(), 0
    for _ in range(300):
        held = [row for row in range(R) if slow.table()[row]]
        empty = [row for row in range(R) if row not in held]
        if held and rng.random() < 0.5:
            for row in (gone := rng.sample(held, rng.randint(1, len(held)))):
                slow.give(row)
            pages, _ = remap(pages, gone, [R] * len(gone))
        elif empty:
            rows = rng.sample(empty, rng.randint(1, len(empty)))
            need = [rng.randint(0, P) for _ in rows]
            pages, ok = take(pages, rows, need)
            want, going = [], True
            for row, num in zip(rows, need, strict=True):
                going = going and (num == 0 or slow.take(row, num))
                want.append(going)
            assert ok == want
            refusals += not all(ok)
        assert table_of(pages) == slow.table()
        assert check(pages) == check_adjoining(pages, WHOLE) == []
    assert refusals > 20


def test_the_same_eagerly_and_mapped():
    cases = [([0, 1, 2], [3, 5, 2]), ([3, 1], [8, 8]), ([2], [0])]
    start, _ = alloc(pages_in_order([4, 9, 1]), [0], [2])
    start, _ = remap(start, [0], [R])
    want = [RESERVE(jax.tree.map(jnp.copy, start), pad(rows, R), pad(need)) for rows, need in cases]
    many = jax.tree.map(lambda x: jnp.stack([x] * len(cases)), start)
    rows, need = (jnp.stack([pad(case[i], fill) for case in cases]) for i, fill in ((0, R), (1, 0)))
    mapped = jax.jit(jax.vmap(reserve))(many, rows, need)
    for i, expected in enumerate(want):
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x: x[i], mapped), expected)  # noqa: B023
    with jax.disable_jit():
        found = reserve(start, pad(cases[0][0], R), pad(cases[0][1]))
    jax.tree.map(np.testing.assert_array_equal, found, want[0])


@pytest.mark.parametrize("chunk", [2, 3, 4])
def test_chunks_stay_whole(chunk):
    """Rows grow by multiples of the chunk and end in any order: each chunk is pages that adjoin, whatever came before."""
    rng = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")
    pages, chunks = pages_in_order(), Allocation(chunk_pages=chunk)
    seen = set()
    for _ in range(200):
        rows = rng.sample(range(R), rng.randint(1, R))
        if rng.random() < 0.4:
            pages, _ = remap(pages, rows, [R] * len(rows))
        else:
            pages, _ = alloc(pages, rows, [rng.randint(0, 2) * chunk for _ in rows])
        assert check(pages) == check_adjoining(pages, chunks) == []
        seen |= {page for row in table_of(pages) for page in row}
    assert seen == set(range(1, (N - 1) // chunk * chunk + 1))  # the rest of the pool is no whole chunk


def test_rows_in_pieces_are_found():
    pages, _ = alloc(pages_in_order([1, 2, 4, 3]), [0], [4])
    assert check(pages) == []
    assert "row 0: pages [1, 2, 4, 3] are not whole pieces of 2" in check_adjoining(pages, Allocation(chunk_pages=2))[0]
    assert "pieces of 4" in check_adjoining(pages, WHOLE)[0]
    pages, _ = ALLOC(pages_in_order(), pad([0], R), pad([3]))
    assert check_adjoining(pages, WHOLE) == []
    assert len(check_adjoining(pages, Allocation(chunk_pages=2))) == 1


def test_only_one_group():
    two = jax.tree.map(lambda x: x, pages_in_order())
    two = two.replace(table=jnp.concatenate([two.table, two.table]))
    with pytest.raises(ValueError, match="num_groups = 1, got 2"):
        reserve(two, pad([0], R), pad([1]))


@pytest.mark.parametrize(("rule", "tokens"), [("max_len", 100), ("pow2", 10 + 32), ("request", 30), ("", 0)])
def test_what_is_reserved(rule, tokens):
    assert Allocation(reserve=rule).reserved(10, 30, 100) == tokens


def test_a_power_of_two_is_not_doubled_and_the_longest_is_the_limit():
    pow2 = Allocation(reserve="pow2")
    assert [pow2.reserved(10, 10 + n, 100) for n in (1, 2, 3, 16, 17, 65)] == [11, 12, 14, 26, 42, 100]


def test_the_books_of_the_host():
    """Pages that a row is expected to take: in whole chunks, or none after a reservation."""
    chunked = Footprint(4, allocation=Allocation(chunk_pages=3))
    assert [chunked.logical(n) for n in (0, 1, 12, 13)] == [0, 3, 3, 6]
    assert (chunked.taken(12, 13), chunked.taken(5, 12), chunked.growth(5, 25, 8)) == (3, 0, 6)
    assert chunked.longest(7, 8, 100) == 24
    whole = Footprint(4, allocation=WHOLE)
    assert (whole.logical(13), whole.taken(0, 13), whole.growth(0, 13, 8)) == (4, 0, 0)
    assert PAGED.is_paged
    assert not WHOLE.is_paged
