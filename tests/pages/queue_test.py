"""The queue when it is long: many windows in one take, stale entries in between, a ring that fills up with them."""

import jax
import numpy as np

from pagedjax.pages import alloc, check, init_pages, match, publish, remap
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
