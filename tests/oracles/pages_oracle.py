"""Page management in plain Python: lists, a loop over rows, one page at a time. Slow, obvious, and exactly the same.

Only the hash of a chain is taken from the package: it decides which bucket a page competes for: policy, not truth.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

import jax
import numpy as np

from pagedjax.pages import NULL_PAGE, Pages
from pagedjax.pages.hashing import prefix_hashes


@dataclasses.dataclass
class Entry:
    """What the index knows of a published page: where its chain comes from, what it holds, where it is listed."""

    parent: tuple[int, int]  # (page, generation) before it, or (N + namespace, 0)
    tokens: tuple[int, ...]
    hash: int


class PagesOracle:
    """The same verbs with Python lists; rows padded with R are skipped."""

    def __init__(self, pages: Pages):
        self.N, self.S, self.R, self.P = pages.total_pages, pages.page_size, pages.max_rows, pages.max_pages_per_row
        self.G = pages.num_groups
        self.secret = np.asarray(pages.secret)
        self._hash = jax.jit(functools.partial(prefix_hashes, bits=pages.hash_bits))
        self.rows: list[list[list[int]]] = [[[] for _ in range(self.G)] for _ in range(self.R)]
        self.counts = [0] * self.N
        self.generation = [0] * self.N
        self.queue = list(range(1, self.N))
        self.index: dict[int, Entry] = {}
        self.buckets = [[NULL_PAGE] * pages.buckets.shape[1] for _ in range(pages.buckets.shape[0])]

    def _take(self) -> int:
        page = self.queue.pop(0)
        self.counts[page] = 1
        self.generation[page] += 1
        self.index.pop(page, None)
        return page

    def _own(self, page: int) -> None:
        if self.counts[page] == 0:
            self.queue.remove(page)
        self.counts[page] += 1

    def _give_back(self, walk: list[int]) -> int:
        for page in walk:
            self.counts[page] -= 1
        seen: list[int] = []
        for page in reversed(walk):
            if self.counts[page] == 0 and page not in seen:
                seen.insert(0, page)
        for page in seen:
            if page in self.index:
                self.queue.append(page)
            else:
                self.queue.insert(0, page)
        return len(seen)

    def alloc(self, rows: list[int], need: list[int]) -> list[bool]:
        ok, failed = [], False
        for row, n in zip(rows, need, strict=True):
            if row < self.R and not failed:
                failed = n < 0 or len(self.rows[row][0]) + n > self.P or n * self.G > len(self.queue)
                if not failed:
                    for group in self.rows[row]:
                        group += [self._take() for _ in range(n)]
            ok.append(not failed)
        return ok

    def remap(self, rows: list[int], src: list[int]) -> int:
        before = [[list(group) for group in row] for row in self.rows]
        walk = []
        for row, s in zip(rows, src, strict=True):
            if row < self.R:
                self.rows[row] = [list(group) for group in before[s]] if s < self.R else [[] for _ in range(self.G)]
                for page in (page for group in self.rows[row] for page in group):
                    self.counts[page] += 1
                walk += [page for group in before[row] for page in reversed(group)]
        return self._give_back(walk)

    def cow(self, rows: list[int], logical: list[int]) -> tuple[list[tuple[int, int]], list[bool]]:
        copies, ok, failed = [], [], False
        for row, column in zip(rows, logical, strict=True):
            if row < self.R and 0 <= column < len(self.rows[row][0]) and not failed:
                shared = [group for group in self.rows[row] if self.counts[group[column]] > 1]
                failed = len(shared) > len(self.queue)
                if not failed:
                    for group in shared:
                        old, group[column] = group[column], self._take()
                        self.counts[old] -= 1
                        copies.append((old, group[column]))
            ok.append(not failed)
        return copies, ok

    def cow_need(self, rows: list[int], logical: list[int]) -> list[int]:
        counts, need = Counter(dict(enumerate(self.counts))), []
        for row, column in zip(rows, logical, strict=True):
            inside = row < self.R and 0 <= column < len(self.rows[row][0])
            shared = [group[column] for group in self.rows[row] if counts[group[column]] > 1] if inside else []
            counts.subtract(shared)
            need.append(len(shared))
        return need

    def _hashes(self, tokens: list[int], namespace: int) -> list[int]:
        pages = np.asarray(tokens, np.int32).reshape(-1, self.S)
        return self._hash(pages, np.int32(namespace), self.secret).tolist()

    def _find(self, tokens: list[int], namespace: int, limit: int) -> list[int]:
        found: list[int] = []
        link = (self.N + namespace, 0)
        for i in range(limit):
            content = tuple(tokens[i * self.S : (i + 1) * self.S])
            page = next((p for p, e in self.index.items() if e.parent == link and e.tokens == content), None)
            if page is None:
                break
            found.append(page)
            link = (page, self.generation[page])
        return found

    def match(self, rows: list[int], tokens: list[list[int]], lengths: list[int], namespaces: list[int]) -> list[int]:
        out = []
        for row, ids, length, namespace in zip(rows, tokens, lengths, namespaces, strict=True):
            found: list[int] = []
            if row < self.R and not self.rows[row][0]:
                found = self._find(ids, namespace, max(length - 1, 0) // self.S)
                self.rows[row] = [found]
                for page in found:
                    self._own(page)
            out.append(len(found))
        return out

    def publish(self, rows: list[int], tokens: list[list[int]], lengths: list[int], namespaces: list[int]) -> list[int]:
        return [
            self._publish_row(row, ids, length, namespace) if row < self.R else 0
            for row, ids, length, namespace in zip(rows, tokens, lengths, namespaces, strict=True)
        ]

    def _publish_row(self, row: int, tokens: list[int], length: int, namespace: int) -> int:
        mine = self.rows[row][0]
        full = min(length // self.S, len(mine))
        found = self._find(tokens, namespace, full)
        dropped = []
        for i, page in enumerate(found):
            if mine[i] != page:
                self._own(page)
                dropped.insert(0, mine[i])
                mine[i] = page
        self._give_back(dropped)
        hashes = self._hashes(tokens, namespace)
        ways = {bucket: self._ways(bucket) for bucket in {h % len(self.buckets) for h in hashes[len(found) : full]}}
        for i in range(len(found), full):
            bucket = hashes[i] % len(self.buckets)
            if not ways[bucket]:
                return i
            way = ways[bucket].pop(0)
            if self._listed(bucket, way) and self.counts[self.buckets[bucket][way]] == 0:
                self.index.pop(self.buckets[bucket][way])
            self.buckets[bucket][way] = mine[i]
            parent = (mine[i - 1], self.generation[mine[i - 1]]) if i else (self.N + namespace, 0)
            self.index[mine[i]] = Entry(parent, tuple(tokens[i * self.S : (i + 1) * self.S]), hashes[i])
        return full

    def _listed(self, bucket: int, way: int) -> bool:
        entry = self.index.get(self.buckets[bucket][way])
        return entry is not None and entry.hash % len(self.buckets) == bucket

    def _ways(self, bucket: int) -> list[int]:
        """Ways of a bucket that may be overwritten, best first: the stale ones, then those whose page is taken next."""
        ways = range(len(self.buckets[bucket]))
        stale = [way for way in ways if not self._listed(bucket, way)]
        unowned = [way for way in ways if way not in stale and self.counts[self.buckets[bucket][way]] == 0]
        return stale + sorted(unowned, key=lambda way: self.queue.index(self.buckets[bucket][way]))

    def pin(self, ids: list[int]) -> None:
        for page in ids:
            if 0 < page < self.N:
                self._own(page)

    def unpin(self, ids: list[int]) -> None:
        self._give_back([page for page in ids if 0 < page < self.N])

    def difference(self, pages: Pages) -> str | None:
        """The first thing in which a host copy of Pages differs; None if nothing does."""
        table = np.zeros((self.G, self.R, self.P), np.int32)
        for r, row in enumerate(self.rows):
            for g, group in enumerate(row):
                table[g, r, : len(group)] = group
        start, tail = int(pages.head), int(pages.tail)
        positions = [(start + k) % 2**32 for k in range((tail - start) % 2**32)]
        entries = [(q, int(pages.queue[q % len(pages.queue)])) for q in positions]
        queue = [page for q, page in entries if int(pages.stamp[page]) == (2 * q + 1) % 2**32]
        index = {
            int(page): Entry(
                (int(pages.parent[page]), int(pages.parent_generation[page])),
                tuple(pages.tokens[page].tolist()),
                int(pages.hash[page]),
            )
            for page in np.nonzero(pages.parent)[0]
        }
        for name, have, want in (
            ("table", pages.table.tolist(), table.tolist()),
            ("num_pages", pages.num_pages.tolist(), [len(row[0]) for row in self.rows]),
            ("ref_counts", pages.ref_counts.tolist(), self.counts),
            ("generation", pages.generation.tolist(), self.generation),
            ("queue", queue, self.queue),
            ("num_unowned", int(pages.num_unowned), len(self.queue)),
            ("index", index, self.index),
            ("buckets", pages.buckets.tolist(), self.buckets),
        ):
            if have != want:
                return f"{name}: have {have}, want {want}"
        return None
