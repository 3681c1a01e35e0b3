"""The queue when it is long: many windows in one take, stale entries in between, a ring that fills up with them."""

import jax
import numpy as np

from pagedjax.pages import alloc, check, init_pages, match, publish, remap
from pagedjax.pages.queue import upcoming
from tests.oracles.pages_oracle import PagesOracle
from tests.pages.world import ints, shift_positions

ROWS, LENGTH, CONTENTS = 4, 64, 8


def test_a_ring_full_of_stale_entries_is_squeezed():
    pages = init_pages(num_pages=700, page_size=1, max_rows=ROWS, max_pages_per_row=2 * LENGTH, secret=(1, 2))
    oracle = PagesOracle(pages)
    # Positions wrap while the ring fills up.
    pages = shift_positions(pages, 2**32 // pages.queue.shape[0] - 1)
    calls = {verb.__name__: jax.jit(verb, donate_argnums=0) for verb in (alloc, remap, match, publish)}
    rows, zeros = list(range(ROWS)), [0] * ROWS

    def call(name, *args):
        nonlocal pages
        pages, result = calls[name](pages, *map(ints, args))
        wanted = getattr(oracle, name)(*args)
        np.testing.assert_array_equal(result, wanted)
        return result

    texts = [[1000 * i + t for t in range(LENGTH + 1)] for i in range(CONTENTS)]
    for half in (texts[:ROWS], texts[ROWS:]):
        call("alloc", rows, [LENGTH] * ROWS)
        call("publish", rows, half, [LENGTH] * ROWS, zeros)
        call("remap", rows, [ROWS] * ROWS)
    ring, squeezed = pages.queue.shape[0], 0
    for turn in range(14):
        # Hits revive pages in the middle of the queue; nothing is taken, so their entries stay.
        used = int(np.uint32(pages.tail - pages.head))
        found = call("match", rows, [texts[(turn + i) % CONTENTS] for i in rows], [LENGTH + 1] * ROWS, zeros)
        assert (found == LENGTH).all()
        call("remap", rows, [ROWS] * ROWS)
        squeezed += int(np.uint32(pages.tail - pages.head)) < used
        host = jax.device_get(pages)
        assert check(host) == []
        assert oracle.difference(host) is None
    assert ring == 2048
    assert squeezed >= 2
    for need in ([2 * LENGTH] * ROWS, zeros, [1, 0, 0, 0]):  # 512 pages at once: several windows
        call("alloc", rows, need)
        assert oracle.difference(jax.device_get(pages)) is None
        call("remap", rows, [ROWS] * ROWS)
    assert check(pages) == []


def test_upcoming_names_the_published_pages_in_the_order_they_are_taken():
    pages = init_pages(num_pages=33, page_size=1, max_rows=ROWS, max_pages_per_row=32, secret=(1, 2))
    rows, zeros = list(range(ROWS)), [0] * ROWS
    texts = [[100 * i + t for t in range(9)] for i in rows]
    pages, _ = alloc(pages, ints(rows), ints([6, 7, 5, 3]))
    pages, _ = publish(pages, ints(rows), ints(texts), ints([4, 7, 0, 3]), ints(zeros))
    pages, _ = remap(pages, ints([2, 0, 1]), ints([ROWS] * 3))  # row 3 keeps its pages
    pages, _ = match(pages, ints([0]), ints([texts[1]]), ints([3]), ints([0]))  # revives two
    pages, _ = remap(pages, ints([0]), ints([ROWS]))  # and they are the youngest now
    for width in (4, 20):
        ids, generations = map(np.asarray, jax.jit(upcoming, static_argnums=1)(pages, width))
        real = ids[ids < 33].tolist()
        assert (ids[len(real) :] == 33).all()
        np.testing.assert_array_equal(generations[: len(real)], np.asarray(pages.generation)[real])
        after, taken = pages, []
        published = np.asarray(pages.parent) != 0
        for _ in range(int(pages.num_unowned)):
            after, _ = alloc(after, ints([0]), ints([1]))
            page = int(after.table[0, 0, int(after.num_pages[0]) - 1])
            taken += [page] if published[page] else []
        assert len(taken) == 4 + 7
        assert real == taken[:width]
