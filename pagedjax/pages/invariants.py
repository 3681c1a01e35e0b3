"""What must hold of a `Pages` value at any time, as a host-side check that names what is broken."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from pagedjax.pages.hashing import chain_seed, finish, multiplier, page_digests
from pagedjax.pages.state import NO_TOKEN, NULL_PAGE, Pages

_MAX_EXAMPLES = 8


def check(pages: Pages, pins: Iterable[int] | None = None, windows: Sequence[int] = ()) -> list[str]:
    """Broken invariants in words; an empty list means sound. Reads everything: for tests and debugging.

    Args:
      pages: one value, not a batch of them.
      pins: page ids pinned at present, as often as they are; None for none.
      windows: one entry a group; rows may lack their first pages where it is above 0 (see `slide`). Empty: nowhere.
    """
    host = jax.tree.map(np.asarray, jax.device_get(pages))
    N = host.ref_counts.shape[0]
    if (host.table < 0).any() or (host.table >= N).any():
        outside = np.unique(host.table[(host.table < 0) | (host.table >= N)])
        return [f"the table names pages outside [0, {N}): {_some(outside)}"]
    pinned = np.bincount(np.asarray(list(pins or ()), np.int64), minlength=N)
    return [*_table(host, windows), *_counts(host, pinned), *_queue(host), *_index(host)]


def _some(ids: Any) -> str:
    ids = [int(i) for i in np.asarray(ids).reshape(-1)]
    return ", ".join(map(str, ids[:_MAX_EXAMPLES])) + (f", ... ({len(ids)} in all)" if len(ids) > _MAX_EXAMPLES else "")


def _table(host: Pages, windows: Sequence[int]) -> list[str]:
    """Used columns hold pages but for those behind a window, unused ones none; a page stands for one logical page only,
    whoever shares it."""
    broken = []
    G, _, P = host.table.shape
    if (host.num_pages < 0).any() or (host.num_pages > P).any():
        broken.append(
            f"num_pages outside [0, {P}] in rows {_some(np.nonzero((host.num_pages < 0) | (host.num_pages > P))[0])}"
        )
    used = np.arange(P) < host.num_pages[:, None]
    windowed = np.asarray([window > 0 for window in windows] or [False] * G)[:, None, None]
    given_back = np.logical_and.accumulate(host.table == NULL_PAGE, axis=-1) & windowed
    holes = ((host.table == NULL_PAGE) & used & ~given_back).any((0, 2))
    if holes.any():
        broken.append(f"rows {_some(np.nonzero(holes)[0])} lack a page below num_pages")
    beyond = ((host.table != NULL_PAGE) & ~used).any((0, 2))
    if beyond.any():
        broken.append(f"rows {_some(np.nonzero(beyond)[0])} name a page beyond num_pages")
    group, row, column = np.nonzero(host.table)
    page = host.table[group, row, column].astype(np.int64)
    place = group.astype(np.int64) * P + column
    lowest, highest = np.full(host.ref_counts.shape[0], G * P), np.full(host.ref_counts.shape[0], -1)
    np.minimum.at(lowest, page, place)
    np.maximum.at(highest, page, place)
    twice = np.nonzero(lowest < highest)[0]
    if twice.size:
        broken.append(f"pages {_some(twice)} stand for different logical pages")
    return broken


def _counts(host: Pages, pinned: np.ndarray) -> list[str]:
    """ref_counts == occurrences in tables + pins, and NULL_PAGE is untouched."""
    broken = []
    if host.ref_counts[NULL_PAGE] or host.stamp[NULL_PAGE] or host.parent[NULL_PAGE] or host.generation[NULL_PAGE]:
        broken.append("NULL_PAGE was counted, queued, taken or published")
    uses = np.bincount(host.table.reshape(-1), minlength=pinned.size) + pinned
    uses[NULL_PAGE] = 0
    negative = np.nonzero(host.ref_counts < 0)[0]
    if negative.size:
        broken.append(f"double release: negative counts at pages {_some(negative)}")
    for page in np.nonzero((host.ref_counts >= 0) & (host.ref_counts != uses))[0][:_MAX_EXAMPLES]:
        broken.append(
            f"page {page}: counted {host.ref_counts[page]} times, but held by {uses[page]} table entries and pins"
        )
    return broken


def _queue(host: Pages) -> list[str]:
    """Every unowned page has exactly one live entry, an owned page none, and num_unowned says how many."""
    broken = []
    N, Q = host.ref_counts.shape[0], host.queue.shape[0]
    length = (int(host.tail) - int(host.head)) % 2**32
    if length > Q:
        return [f"the queue holds {length} entries, more than its {Q} slots"]
    position = (int(host.head) + np.arange(length, dtype=np.int64)) % 2**32
    page = host.queue[position % Q]
    if ((page < 1) | (page >= N)).any():
        return [f"the queue holds ids outside [1, {N}): {_some(page[(page < 1) | (page >= N)])}"]
    live = host.stamp[page].astype(np.int64) == (2 * position + 1) % 2**32
    entries = np.bincount(page[live], minlength=N)
    unowned = host.ref_counts <= 0
    unowned[NULL_PAGE] = False
    for what, wrong in (
        ("without an owner are not queued", unowned & (entries == 0)),
        ("are queued twice", entries > 1),
        ("are queued and owned", ~unowned & (entries > 0)),
        ("are owned and stamped", ~unowned & (host.stamp != 0)),
    ):
        if wrong.any():
            broken.append(f"pages {_some(np.nonzero(wrong)[0])} {what}")
    if int(host.num_unowned) != int(unowned.sum()):
        broken.append(f"num_unowned is {int(host.num_unowned)}, but {int(unowned.sum())} pages have no owner")
    return broken


def _is_listed_child(host: Pages, page: int) -> bool:
    """Whether an unfilled page is listed under what comes before it (or that is gone, and the page out of reach)."""
    N, parent = host.ref_counts.shape[0], int(host.parent[page])
    if host.tokens[page, -1] != NO_TOKEN:
        return False
    if parent >= N:
        seed = chain_seed(np.asarray([parent - N], np.uint32), host.secret)
        before = int(finish(seed, host.secret, host.hash_bits)[0])
    elif int(host.generation[parent]) != int(host.parent_generation[page]):
        return True
    else:
        before = int(host.hash[parent])
    return bool((np.asarray(host.children[before % host.children.shape[0]]) == page).any())


def _index(host: Pages) -> list[str]:
    """A published page is in the bucket of its hash, or, unfilled, listed under what comes before it; a reachable one has
    the hash of its whole past, and no twin."""
    broken = []
    N, Bk = host.ref_counts.shape[0], host.buckets.shape[0]
    if any(((lists < 0) | (lists >= N)).any() for lists in (host.buckets, host.children)):
        return ["a bucket names a page that does not exist"]
    published = [int(page) for page in np.nonzero(host.parent)[0]]
    listed = (host.buckets[host.hash & np.uint32(Bk - 1)] == np.arange(N)[:, None]).any(1)
    unlisted = [page for page in published if not listed[page] and not _is_listed_child(host, page)]
    if unlisted:
        broken.append(f"published pages {_some(unlisted)} are in no bucket")
    children: dict[tuple[int, int], list[int]] = {}
    for page in published:
        children.setdefault((int(host.parent[page]), int(host.parent_generation[page])), []).append(page)
    states: dict[int, int] = {}  # hash state of each reachable page
    twins: dict[tuple, int] = {}
    digests = page_digests(host.tokens.astype(np.uint32), host.secret)
    factor = int(multiplier(host.secret))
    roots = [link for link in children if link[0] >= N]
    seeds = chain_seed(np.asarray([link[0] - N for link in roots], np.uint32), host.secret)
    frontier = [(page, int(seed)) for link, seed in zip(roots, seeds, strict=True) for page in children[link]]
    while frontier:
        page, before = frontier.pop()
        if page in states:
            broken.append(f"page {page} is reachable in two ways")
            continue
        states[page] = (before * factor + int(digests[page])) % 2**32
        link = (int(host.parent[page]), int(host.parent_generation[page]))
        twin = twins.setdefault((link, host.tokens[page].tobytes()), page)
        if twin != page:
            broken.append(f"pages {twin} and {page} are published with the same past and content")
        frontier += [(kid, states[page]) for kid in children.get((page, int(host.generation[page])), ())]
    reached = np.fromiter(states, np.int64, len(states))
    hashes = finish(np.fromiter(states.values(), np.int64, len(states)).astype(np.uint32), host.secret, host.hash_bits)
    wrong = reached[host.hash[reached] != hashes]
    if wrong.size:
        broken.append(f"pages {_some(wrong)} carry another hash than their past gives")
    return broken
