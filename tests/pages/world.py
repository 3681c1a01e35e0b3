"""A make-believe engine: rows with tokens, a KV pool that remembers what was written, the verbs, and the oracle.

The pool holds, for each slot, the whole past of the token written there. Whatever sharing, copying, recycling and
prefix hits do to the tables, each row must find its own past behind every one of its tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax import pages as verbs
from pagedjax.pages import NULL_PAGE, Pages, check, init_pages
from tests.oracles.pages_oracle import PagesOracle

VERBS: dict[str, Callable] = {
    "alloc": verbs.alloc,
    "remap": verbs.remap,
    "cow": verbs.cow,
    "match": verbs.match,
    "adopt": verbs.adopt,
    "publish": lambda pages, *args: verbs.publish(pages, *args[:-1], args[-1] > 0),
    "pin": verbs.pin,
    "unpin": verbs.unpin,
    "slide": verbs.slide,
}

COW_NEED = jax.jit(verbs.cow_need)

GEOMETRIES: dict[str, dict[str, Any]] = {
    # Enough room that prefix hits and revivals are common; positions wrap around 2**32 early.
    "roomy": {"num_pages": 40, "page_size": 4, "max_rows": 6, "max_pages_per_row": 8, "secret": (1, 2)},
    # Sixteen hash values in four buckets of two: collisions everywhere, buckets full of owned pages.
    "collisions": {
        "num_pages": 26,
        "page_size": 2,
        "max_rows": 6,
        "max_pages_per_row": 8,
        "secret": (3, 4),
        "hash_bits": 4,
        "num_buckets": 4,
        "num_ways": 2,
    },
    # Three layer groups, two of which see a window.
    "windows": {
        "num_pages": 60,
        "page_size": 2,
        "max_rows": 5,
        "max_pages_per_row": 12,
        "num_groups": 3,
        "secret": (7, 8),
    },
    # One table for all layers, which all see a window.
    "one_window": {"num_pages": 40, "page_size": 2, "max_rows": 5, "max_pages_per_row": 12, "secret": (9, 10)},
    # Two layer groups and a pool that is always short.
    "groups": {
        "num_pages": 30,
        "page_size": 2,
        "max_rows": 5,
        "max_pages_per_row": 6,
        "num_groups": 2,
        "secret": (5, 6),
    },
}


WINDOWS = {"windows": (0, 3, 6), "one_window": (5,)}
"""Tokens that a query sees, by group, in geometries where that is not all."""


def ints(values: Any) -> jax.Array:
    return jnp.asarray(np.asarray(values, np.int32))


def shift_positions(pages: Pages, laps: int) -> Pages:
    """The same queue, `laps` times round the ring further on: every slot keeps its meaning."""
    by = np.uint32((laps * pages.queue.shape[0]) % 2**32)
    stamp = np.asarray(pages.stamp)
    return pages.replace(
        head=pages.head + by, tail=pages.tail + by, stamp=jnp.asarray(np.where(stamp & 1, stamp + (by << 1), stamp))
    )


JITTED = {name: jax.jit(verb, donate_argnums=0) for name, verb in VERBS.items()}


def jitted(name: str, pages: Pages, *args: jax.Array) -> Any:
    """The verb compiled, once per geometry, and in place."""
    return JITTED[name](pages, *args)


def eager(name: str, pages: Pages, *args: jax.Array) -> Any:
    """The verb operation by operation, loops in Python too."""
    with jax.disable_jit():
        return VERBS[name](pages, *args)


class World:
    """Applies operations to Pages and oracle and compares everything after each."""

    def __init__(self, geometry: str, run: Callable, record: list | None = None):
        self.pages = init_pages(**GEOMETRIES[geometry])
        self.oracle = PagesOracle(self.pages)
        if geometry == "roomy":
            self.pages = shift_positions(self.pages, 2**32 // self.pages.queue.shape[0] - 1)
        self.run, self.record = run, record
        self.R, self.N, self.S, self.P, self.G = (getattr(self.oracle, name) for name in "RNSPG")
        self.tokens: list[list[int]] = [[] for _ in range(self.R)]
        self.namespace = [0] * self.R
        self.pins: list[int] = []
        self.kv: dict[tuple[int, int], tuple] = {}
        self.windows = WINDOWS.get(geometry, (0,) * self.G)
        self.hits = self.partial_hits = self.failures = self.copies = self.given_back = 0

    @property
    def adopts(self) -> bool:
        """Hits within a page are found where there is one group."""
        return self.G == 1

    def _call(self, name: str, *args: Any) -> Any:
        arrays = [ints(arg) for arg in args]
        if self.record is not None:
            self.record.append((name, arrays))
        self.pages, *results = self.run(name, self.pages, *arrays)
        return [None if result is None else np.asarray(result) for result in results]

    def _pad(self, values: list[int], fill: int) -> list[int]:
        return values + [fill] * (self.R - len(values))

    def grow(self, rows: list[int], news: list[list[int]]) -> None:
        """Append tokens to rows, in this order: pages, copy-on-write, write."""
        news = [self._in_reach(r, new) for r, new in zip(rows, news, strict=True)]
        need = [
            max(-(-(len(self.tokens[r]) + len(new)) // self.S) - len(self.oracle.rows[r][0]), 0)
            for r, new in zip(rows, news, strict=True)
        ]
        rows, need = self._pad(rows, self.R), self._pad(need, 1)
        (ok,) = self._call("alloc", rows, need)
        assert ok.tolist() == self.oracle.alloc(rows, need)
        self.verify()
        writers = [r if good else self.R for r, good in zip(rows, ok, strict=True)]
        written = self.own_page(writers)
        for r, new, good in zip(writers, news, written, strict=False):
            if good and r < self.R:
                self._write(r, new)
            else:
                self.failures += 1
        self.verify()

    def _in_reach(self, row: int, new: list[int]) -> list[int]:
        """What one `cow` covers: a row that holds pages beyond the one it writes may share them, and stops there."""
        length, mapped = len(self.tokens[row]), len(self.oracle.rows[row][0])
        return new[: self.S - length % self.S] if mapped > length // self.S + 1 else new

    def own_page(self, rows: list[int]) -> list[bool]:
        """Copy-on-write of the page that each row writes next."""
        logical = [len(self.tokens[r]) // self.S if r < self.R else 0 for r in rows]
        assert COW_NEED(self.pages, ints(rows), ints(logical)).tolist() == self.oracle.cow_need(rows, logical)
        copies, ok = self._call("cow", rows, logical)
        pairs = [(s, d) for s, d in copies.tolist() if d < self.N]
        assert (pairs, ok.tolist()) == self.oracle.cow(rows, logical)
        before = dict(self.kv)
        for source, target in pairs:
            for offset in range(self.S):
                self.kv[target, offset] = before.get((source, offset), ())
        self.copies += len(pairs)
        return ok.tolist()

    def _write(self, row: int, new: list[int]) -> None:
        for token in new:
            logical, offset = divmod(len(self.tokens[row]), self.S)
            self.tokens[row].append(token)
            for group in self.oracle.rows[row]:
                assert group[logical] != NULL_PAGE
                assert self.oracle.counts[group[logical]] == 1 or group[logical] in self.pins, (
                    "a shared page was written"
                )
                assert group[logical] not in self.oracle.index, "a published page was written"
                self.kv[group[logical], offset] = (self.namespace[row], *self.tokens[row])

    def remap(self, rows: list[int], src: list[int]) -> None:
        padded = self._pad(rows, self.R), self._pad(src, 0)
        (count,) = self._call("remap", *padded)
        assert int(count) == self.oracle.remap(*padded)
        before = [list(t) for t in self.tokens], list(self.namespace)
        for r, s in zip(rows, src, strict=True):
            self.tokens[r] = list(before[0][s]) if s < self.R else []
            self.namespace[r] = before[1][s] if s < self.R else 0
        self.verify()

    def _texts(self, texts: list[list[int]]) -> list[list[int]]:
        width = self.P * self.S
        return [(list(t) + [0] * width)[:width] for t in texts + [[]] * (self.R - len(texts))]

    def admit(self, rows: list[int], prompts: list[list[int]], namespaces: list[int]) -> None:
        """Match prompts into empty rows; a row without a hit stays empty."""
        assert all(not self.tokens[r] for r in rows)
        args = (
            self._pad(rows, self.R),
            self._texts(prompts),
            self._pad([len(p) for p in prompts], 9),
            self._pad(namespaces, 0),
        )
        (found,) = self._call("match", *args)
        assert found.tolist() == self.oracle.match(*args)
        for r, prompt, namespace, n in zip(rows, prompts, namespaces, found.tolist(), strict=False):
            assert n * self.S < max(len(prompt), 1)
            self.tokens[r], self.namespace[r] = prompt[: n * self.S], namespace
            self.hits += n
        self.verify()
        if self.adopts:
            self._adopt(rows, prompts, args)

    def _adopt(self, rows: list[int], prompts: list[list[int]], args: tuple) -> None:
        copies, more = self._call("adopt", *args)
        pairs = [(s, d) for s, d in copies.tolist() if d < self.N]
        assert (pairs, more.tolist()) == self.oracle.adopt(*args)
        for source, target in pairs:
            for offset in range(self.S):
                self.kv[target, offset] = self.kv.get((source, offset), ())
        for r, prompt, n in zip(rows, prompts, more.tolist(), strict=False):
            self.tokens[r] = prompt[: len(self.tokens[r]) + n]
            assert len(self.tokens[r]) < max(len(prompt), 1)
        self.partial_hits += len(pairs)
        self.verify()

    def end(self, rows: list[int]) -> None:
        """Rows that are done: everything they hold is published, then they are released."""
        self.publish(rows, [len(self.tokens[r]) for r in rows], tail=True)
        self.remap(rows, [self.R] * len(rows))

    def publish(self, rows: list[int], lengths: list[int], *, tail: bool = False) -> None:
        args = (
            self._pad(rows, self.R),
            self._texts([self.tokens[r] for r in rows]),
            self._pad(lengths, 9),
            self._pad([self.namespace[r] for r in rows], 0),
            self._pad([int(tail)] * len(rows), 0),
        )
        (count,) = self._call("publish", *args)
        assert count.tolist() == self.oracle.publish(*args)
        self.verify()

    def slide(self, rows: list[int]) -> None:
        """Give back what the rows' next tokens do not see."""
        rows = self._pad(rows, self.R)
        lengths = [len(self.tokens[r]) if r < self.R else 9 for r in rows]
        first = [[max(n - w + 1, 0) // self.S if w else 0 for n in lengths] for w in self.windows]
        assert verbs.first_needed(ints(lengths), self.windows, self.S).tolist() == first
        (count,) = self._call("slide", rows, first)
        assert int(count) == self.oracle.slide(rows, first)
        self.given_back += int(count)
        self.verify()

    def pin(self, ids: list[int]) -> None:
        ids = self._pad(ids, self.N)
        self._call("pin", ids)
        self.oracle.pin(ids)
        self.pins += [i for i in ids if 0 < i < self.N]
        self.verify()

    def unpin(self, ids: list[int]) -> None:
        ids = self._pad(ids, self.N)
        self._call("unpin", ids)
        self.oracle.unpin(ids)
        for i in ids:
            if i < self.N:
                self.pins.remove(i)
        self.verify()

    def verify(self) -> None:
        """Invariants, equality with the oracle, and everybody's past behind every token."""
        host = jax.device_get(self.pages)
        assert check(host, self.pins, self.windows) == []
        assert self.oracle.difference(host) is None, self.oracle.difference(host)
        for r in range(self.R):
            length = len(self.tokens[r])
            for t in range(length):
                for group, window in zip(self.oracle.rows[r], self.windows, strict=True):
                    if group[t // self.S] == NULL_PAGE:
                        assert window, f"row {r}, token {t}: given back without a window"
                        assert t <= length - window, f"row {r}, token {t}: given back inside the window"
                        continue
                    past = (self.namespace[r], *self.tokens[r][: t + 1])
                    assert self.kv[group[t // self.S], t % self.S] == past, (
                        f"row {r}, token {t}: a page of somebody else"
                    )

    def finish(self) -> None:
        """Release everything; all pages must be free or cached."""
        self.remap(list(range(self.R)), [self.R] * self.R)
        while self.pins:
            self.unpin(self.pins[: self.R])
        stats = verbs.stats(self.pages)
        assert int(stats.free + stats.cached) == self.N - 1


OPERATIONS = (
    "admit",
    "grow",
    "grow",
    "grow",
    "exhaust",
    "remap",
    "end",
    "release",
    "publish",
    "publish",
    "pin",
    "unpin",
    "slide",
)


def step(world: World, rng: random.Random, kind: str) -> None:
    """One random operation of a kind, valid in the world's present state."""
    w = world
    rows = rng.sample(range(w.R), rng.randint(1, w.R))
    if kind == "admit":
        rows = [r for r in rows if not w.oracle.rows[r][0]]
        # Two first tokens and two others: many prompts begin alike.
        prompts = [
            [rng.randint(0, 1) if rng.random() < 0.1 else 0 for _ in range(rng.randint(0, w.P * w.S))] for _ in rows
        ]
        w.admit(rows, prompts, [int(rng.random() < 0.2) for _ in rows])
    elif kind in ("grow", "exhaust"):
        most = w.P * w.S if kind == "exhaust" else w.S + 1
        news = [[rng.randint(0, 1) if rng.random() < 0.1 else 0 for _ in range(rng.randint(1, most))] for _ in rows]
        if kind == "grow":
            news = [new[: w.P * w.S - len(w.tokens[r])] for r, new in zip(rows, news, strict=True)]
        w.grow(rows, news)
    elif kind == "remap":
        w.remap(rows, [rng.randint(0, w.R) for _ in rows] if rng.random() < 0.5 else rng.sample(rows, len(rows)))
    elif kind == "end" and w.adopts:
        w.end(rows)
    elif kind == "release":
        w.remap(rows, [w.R] * len(rows))
    elif kind == "publish":
        w.publish(rows, [rng.randint(0, len(w.tokens[r])) if rng.random() < 0.3 else len(w.tokens[r]) for r in rows])
    elif kind == "slide" and any(w.windows):
        w.slide(rows)
    elif kind == "pin":
        w.pin([rng.choice([w.N, rng.randint(1, w.N - 1)]) for _ in range(rng.randint(0, 3))])
    elif kind == "unpin":
        w.unpin(rng.sample(w.pins, min(len(w.pins), rng.randint(0, w.R))))
