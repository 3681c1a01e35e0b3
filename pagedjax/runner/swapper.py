"""Moves pages between a runner's device state and a host pool, and measures what that costs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pagedjax.runner.rate import Rate
from pagedjax.runner.runner import Runner
from pagedjax.runner.swap import SWAP_WIDTH, Blocks
from pagedjax.runner.swap_pool import SwapPool

Copy = tuple[Blocks, jax.Array]  # pages, and their generations


class Swapper:
    """Programs `swap_out`, `swap_in` and `look_ahead` of a runner, with the host's end of them.

    Attributes:
      pool: the host's pages.
    """

    def __init__(self, runner: Runner, num_pages: int) -> None:
        self._runner = runner
        self.pool = SwapPool(runner.state.cache, num_pages)
        self._out, self._in = Rate(), Rate()

    @property
    def out_seconds(self) -> float | None:
        """Seconds a page to the host; None before one was moved."""
        return self._out.value

    @property
    def in_seconds(self) -> float | None:
        """Seconds a page from the host; what the way out costs before one was moved."""
        return self._out.value if self._in.value is None else self._in.value

    def probe(self) -> None:
        """Measure the way out on pages that are thrown away. The state is only read."""
        seconds = 0.0
        for _ in range(2):  # the first one compiles, or touches fresh memory
            started = time.perf_counter()
            jax.device_get(self._gather(self._runner.max_rows, [(0, 0)]))
            seconds = time.perf_counter() - started
        self._out.add(seconds, SWAP_WIDTH)

    def _gather(self, row: int, places: Sequence[tuple[int, int]]) -> tuple[Blocks, jax.Array]:
        return self._runner.inspect("swap_out", np.int32(row), *_columns(places))

    def out(self, row: int, places: Sequence[tuple[int, int]], pages: Sequence[int]) -> bool:
        """Copy a row's pages, named by (group, logical page), into pages of the pool; returns whether it has them all."""
        self._runner.programs.get("swap_out")  # a compilation is no part of the cost
        started, whole = time.perf_counter(), True
        for i in range(0, len(places), SWAP_WIDTH):
            part = places[i : i + SWAP_WIDTH]
            blocks, generations = jax.device_get(self._gather(row, part))
            self.pool.write(pages[i : i + SWAP_WIDTH], blocks)
            # No page that was ever taken is of generation 0, but the null page is.
            whole = whole and bool(np.all(generations[: len(part)] != 0))
        self._out.add(time.perf_counter() - started, len(places))
        return whole

    def begin_out(self, physical: Sequence[int]) -> list[Copy]:
        """Start copying physical pages, SWAP_WIDTH in each result; `finish_out` waits for it."""
        copies = [
            self._gather(self._runner.max_rows, [(0, page) for page in physical[i : i + SWAP_WIDTH]])
            for i in range(0, len(physical), SWAP_WIDTH)
        ]
        for leaf in jax.tree.leaves(copies):
            leaf.copy_to_host_async()
        return copies

    def finish_out(self, copies: Sequence[Copy], pages: Sequence[int]) -> list[int]:
        """Take over what `begin_out` copied, into pages of the pool; returns the generations of the copied pages."""
        generations: list[int] = []
        for k, copy in enumerate(copies):
            blocks, found = jax.device_get(copy)
            self.pool.write(pages[k * SWAP_WIDTH : (k + 1) * SWAP_WIDTH], blocks)
            generations += found.tolist()
        return generations[: len(pages)]

    def into(self, row: int, places: Sequence[tuple[int, int]], pages: Sequence[int], num_computed: int) -> None:
        """Fill a row's pages, named by (group, logical page), column by column, with the content of pages of the pool; see
        `swap.swap_in`. The device must have room for those that the row lacks."""
        self._runner.programs.get("swap_in")
        started = time.perf_counter()
        for i in range(0, len(places), SWAP_WIDTH):
            part = pages[i : i + SWAP_WIDTH]
            ok = self._runner.apply(
                "swap_in",
                np.int32(row),
                *_columns(places[i : i + SWAP_WIDTH]),
                self.pool.read(part, SWAP_WIDTH),
                np.int32(len(part)),
                np.int32(num_computed),
            )
            assert ok, "the room was counted"
        self._in.add(time.perf_counter() - started, len(places))

    def begin_look(self) -> Any:
        """Start looking which cached pages are recycled next; `finish_look` waits for it."""
        return self._runner.inspect("look_ahead")

    def finish_look(self, look: Any) -> list[tuple[int, int]]:
        """(physical page, generation) of what `begin_look` saw, the first one first."""
        ids, generations = jax.device_get(look)
        real = ids <= self._runner.num_usable_pages
        return list(zip(ids[real].tolist(), generations[real].tolist(), strict=True))


def _columns(places: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """(groups, pages) i32[SWAP_WIDTH] each, padded with 0."""
    padded = np.zeros((2, SWAP_WIDTH), np.int32)
    padded[:, : len(places)] = np.array(places, np.int32).T
    return padded[0], padded[1]
