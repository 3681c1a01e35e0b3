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
from pagedjax.pages.hashing import chain_seed, finish, prefix_hashes
from pagedjax.pages.state import NO_TOKEN
from pagedjax.pages.window import SLIDE_WIDTH


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
        self.children = [list(ways) for ways in self.buckets]
        self.hash_bits = pages.hash_bits
        self.hash_of = dict.fromkeys(range(self.N), 0)  # also of pages that are published no more

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
        walk = [page for page in walk if page != NULL_PAGE]
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
                    self.counts[page] += page != NULL_PAGE
                walk += [page for group in before[row] for page in reversed(group)]
        return self._give_back(walk)

    def slide(self, rows: list[int], first: list[list[int]], width: int = SLIDE_WIDTH) -> int:
        """`first` by group, then by row. Round by round, `width` pages of each row and group at a time."""
        ends = [[min(first[g][i], len(self.rows[r][0])) if r < self.R else 0 for g in range(self.G)]
                for i, r in enumerate(rows)]  # fmt: skip
        count = 0
        while True:
            walk = []
            for i, row in enumerate(rows):
                for g in range(self.G):
                    for _ in range(width):
                        if ends[i][g] > 0:
                            ends[i][g] -= 1
                            walk.append(self.rows[row][g][ends[i][g]])
                            self.rows[row][g][ends[i][g]] = NULL_PAGE
            walk = [page for page in walk if page != NULL_PAGE]
            if not walk:
                return count
            count += len(walk)
            self._give_back(walk)

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
                limit = max(length - 1, 0) // self.S
                chains = [self._find(ids, namespace * self.G + g, limit) for g in range(self.G)]
                found = min(chains, key=len)
                self.rows[row] = [chain[: len(found)] for chain in chains]
                for page in (page for group in self.rows[row] for page in group):
                    self._own(page)
            out.append(len(found))
        return out

    def _root(self, namespace: int) -> int:
        seed = chain_seed(np.asarray([namespace], np.uint32), self.secret)
        return int(finish(seed, self.secret, self.hash_bits)[0])

    def _before(self, page: int) -> int | None:
        """Hash of what comes before a published page; None where that is gone."""
        parent, generation = self.index[page].parent
        if parent >= self.N:
            return self._root(parent - self.N)
        return self.hash_of[parent] if self.generation[parent] == generation else None

    def _best_child(self, link: tuple[int, int], before: int, following: list[int]) -> tuple[int, int]:
        """The listed page behind a prefix that begins most like `following`, and how many tokens agree."""
        best = (NULL_PAGE, 0)
        for page in self.children[before % len(self.children)]:
            if page in self.index and self.index[page].parent == link:
                agree = 0
                for have, want in zip(self.index[page].tokens, following, strict=False):
                    if have != want:
                        break
                    agree += 1
                if agree > best[1]:
                    best = (page, agree)
        return best

    def adopt(
        self, rows: list[int], tokens: list[list[int]], lengths: list[int], namespaces: list[int]
    ) -> tuple[list[tuple[int, int]], list[int]]:
        found = []
        for row, ids, length, namespace in zip(rows, tokens, lengths, namespaces, strict=True):
            found.append((NULL_PAGE, 0))
            if row < self.R and len(self.rows[row][0]) < self.P:
                mine = self.rows[row][0]
                following = ids[len(mine) * self.S : max(0, min((len(mine) + 1) * self.S, length - 1))]
                link = (mine[-1], self.generation[mine[-1]]) if mine else (self.N + namespace, 0)
                before = self.hash_of[mine[-1]] if mine else self._root(namespace)
                found[-1] = self._best_child(link, before, following)
        sources = [page for page, agree in found if agree]
        for page in sources:
            self._own(page)
        copies, counts, failed = [], [], False
        for row, (page, agree) in zip(rows, found, strict=True):
            failed = failed or (agree > 0 and not self.queue)
            if agree and not failed:
                self.rows[row][0].append(self._take())
                copies.append((page, self.rows[row][0][-1]))
            counts.append(0 if failed else agree)
        self._give_back(sources)
        return copies, counts

    def publish(
        self,
        rows: list[int],
        tokens: list[list[int]],
        lengths: list[int],
        namespaces: list[int],
        tails: list[int] | None = None,
    ) -> list[int]:
        return [
            min(self._publish_row(row, g, ids, length, namespace * self.G + g, bool(tail)) for g in range(self.G))
            if row < self.R
            else 0
            for row, ids, length, namespace, tail in zip(
                rows, tokens, lengths, namespaces, tails or [0] * len(rows), strict=True
            )
        ]

    def _publish_row(self, row: int, g: int, tokens: list[int], length: int, namespace: int, tail: bool) -> int:
        mine = self.rows[row][g]
        full = min(length // self.S, len(mine))
        found = self._find(tokens, namespace, full)
        dropped = []
        for i, page in enumerate(found):
            if mine[i] not in (page, NULL_PAGE):
                self._own(page)
                dropped.insert(0, mine[i])
                mine[i] = page
        self._give_back(dropped)
        if NULL_PAGE in mine[len(found) : full]:
            return len(found)  # what was given back is not known any more, so nothing can follow it
        mine = found + mine[len(found) :]
        tokens = [token if t < length else NO_TOKEN for t, token in enumerate(tokens)]
        hashes = self._hashes(tokens, namespace)
        ways = {bucket: self._ways(bucket) for bucket in {h % len(self.buckets) for h in hashes[len(found) : full]}}
        published = full
        for i in range(len(found), full):
            bucket = hashes[i] % len(self.buckets)
            if not ways[bucket]:
                published = i
                break
            way = ways[bucket].pop(0)
            if self._listed(bucket, way) and self.counts[self.buckets[bucket][way]] == 0:
                self.index.pop(self.buckets[bucket][way])
            self.buckets[bucket][way] = mine[i]
            linked_anew = mine[i] in self.index
            self._enter(mine, i, tokens, hashes, namespace)
            if linked_anew:  # what follows it in the index is in reach again
                self._list(mine, list(range(len(found), i + 1)), full, tokens, hashes, namespace)
                return self._publish_row(row, g, tokens, length, namespace, tail)
        new = list(range(len(found), published))
        unfilled = tail and published == full and length % self.S > 0 and len(mine) > full
        if unfilled and self._is_news(mine, full, tokens[full * self.S : length], hashes, namespace):
            new.append(full)
        self._list(mine, new, full, tokens, hashes, namespace)
        return published

    def _link(self, mine: list[int], i: int, namespace: int) -> tuple[int, int]:
        return (mine[i - 1], self.generation[mine[i - 1]]) if i else (self.N + namespace, 0)

    def _enter(self, mine: list[int], i: int, tokens: list[int], hashes: list[int], namespace: int) -> None:
        content = tuple(tokens[i * self.S : (i + 1) * self.S])
        self.index[mine[i]] = Entry(self._link(mine, i, namespace), content, hashes[i])
        self.hash_of[mine[i]] = hashes[i]

    def _is_news(self, mine: list[int], i: int, content: list[int], hashes: list[int], namespace: int) -> bool:
        before = hashes[i - 1] if i else self._root(namespace)
        _, agree = self._best_child(self._link(mine, i, namespace), before, content)
        return agree < len(content) and self.counts[mine[i]] == 1

    def _list(
        self, mine: list[int], new: list[int], full: int, tokens: list[int], hashes: list[int], namespace: int
    ) -> None:
        """List pages `new` of a row under what comes before them; number `full` is the unfilled one."""
        places = []
        buckets = {i: (hashes[i - 1] if i else self._root(namespace)) % len(self.children) for i in new}
        ways = {bucket: self._child_ways(bucket) for bucket in buckets.values()}
        for i, bucket in buckets.items():
            if ways[bucket]:
                places.append((i, bucket, ways[bucket].pop(0)))
        for _, bucket, way in places:
            old = self.children[bucket][way]
            if self._is_listed_child(bucket, way) and self.index[old].tokens[-1] == NO_TOKEN:
                self.index.pop(old)
        for i, bucket, way in places:
            if i == full:
                self._enter(mine, i, tokens, hashes, namespace)
            self.children[bucket][way] = mine[i]

    def _is_listed_child(self, bucket: int, way: int) -> bool:
        page = self.children[bucket][way]
        before = self._before(page) if page in self.index else None
        return before is not None and before % len(self.children) == bucket

    def _child_ways(self, bucket: int) -> list[int]:
        ways = range(len(self.children[bucket]))
        stale = [way for way in ways if not self._is_listed_child(bucket, way)]
        unowned = [way for way in ways if way not in stale and self.counts[self.children[bucket][way]] == 0]

        def last_to_go(way: int) -> tuple[bool, int]:
            page = self.children[bucket][way]
            return self.index[page].tokens[-1] == NO_TOKEN, self.queue.index(page)

        return stale + sorted(unowned, key=last_to_go)

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
            ("children", pages.children.tolist(), self.children),
        ):
            if have != want:
                return f"{name}: have {have}, want {want}"
        return None
