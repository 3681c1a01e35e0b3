"""A small pool and the verbs compiled once for it: arguments are Python lists, padded to as many lanes as rows."""

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax import pages as verbs
from pagedjax.pages import check, init_pages
from tests.pages.world import ints

N, S, R, P = 16, 4, 4, 8
EMPTY = R  # as a source row
ALLOC, REMAP, COW, COW_NEED, MATCH, ADOPT, PUBLISH, PIN, UNPIN, STATS = map(
    jax.jit,
    (
        verbs.alloc,
        verbs.remap,
        verbs.cow,
        verbs.cow_need,
        verbs.match,
        verbs.adopt,
        verbs.publish,
        verbs.pin,
        verbs.unpin,
        verbs.stats,
    ),
)


def pages_in_order(order=(), usable=N - 1):
    """Free pages that will be taken in the given order, the others after them; those above `usable` are pinned away."""
    pages = init_pages(num_pages=N, page_size=S, max_rows=R, max_pages_per_row=P, secret=(1, 2))
    order = [*order, *(page for page in range(1, N) if page not in order)]
    stamp = np.zeros(N, np.uint32)
    stamp[order] = 2 * np.arange(N - 1) + 1
    queue = np.zeros(pages.queue.shape[0], np.int32)
    queue[: N - 1] = order
    pages = pages.replace(queue=jnp.asarray(queue), stamp=jnp.asarray(stamp))
    assert check(pages) == []
    return PIN(pages, ints([page if page > usable else N for page in range(N)]))[0]


def sound(pages, usable=N - 1, pins=()):
    return check(pages, [*pins, *range(usable + 1, N)]) == []


def pad(values, fill=0):
    """One compiled shape for all examples: as many lanes as there are rows."""
    return ints([*values, *[fill] * (R - len(values))])


def texts(rows):
    return ints([*rows, *[[0] * P * S] * (R - len(rows))])


def alloc(pages, rows, need):
    pages, ok = ALLOC(pages, pad(rows, R), pad(need))
    return pages, ok[: len(rows)].tolist()


def remap(pages, rows, src):
    pages, freed = REMAP(pages, pad(rows, R), pad(src))
    return pages, int(freed)


def cow(pages, rows, logical):
    pages, copies, ok = COW(pages, pad(rows, R), pad(logical))
    return pages, [pair for pair in copies.tolist() if pair[1] < N], ok[: len(rows)].tolist()


def match(pages, rows, tokens, lengths, namespaces):
    pages, found = MATCH(pages, pad(rows, R), texts(tokens), pad(lengths), pad(namespaces))
    return pages, found[: len(rows)].tolist()


def adopt(pages, rows, tokens, lengths, namespaces):
    pages, copies, more = ADOPT(pages, pad(rows, R), texts(tokens), pad(lengths), pad(namespaces))
    return pages, [pair for pair in copies.tolist() if pair[1] < N], more[: len(rows)].tolist()


def publish(pages, rows, tokens, lengths, namespaces, tails=None):
    pages, count = PUBLISH(pages, pad(rows, R), texts(tokens), pad(lengths), pad(namespaces), pad(tails or []) > 0)
    return pages, count[: len(rows)].tolist()


def pin(pages, ids):
    return PIN(pages, ints([*ids, *[N] * (N - len(ids))]))[0]


def unpin(pages, ids):
    return UNPIN(pages, ints([*ids, *[N] * (N - len(ids))]))[0]


def counts(pages):
    return {name: int(value) for name, value in STATS(pages)._asdict().items()}


def ref_counts(pages, *ids):
    return [int(pages.ref_counts[i]) for i in ids]


TEXT = list(range(P * S))
OTHER = list(range(P * S, 2 * P * S))
