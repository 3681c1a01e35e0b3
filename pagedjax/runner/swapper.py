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
            jax.device_get(self._gather(self._runner.max_rows, [0]))
            seconds = time.perf_counter() - started
        self._out.add(seconds, SWAP_WIDTH)

    def _gather(self, row: int, index: Sequence[int]) -> tuple[Blocks, jax.Array]:
        padded = np.zeros(SWAP_WIDTH, np.int32)
        padded[: len(index)] = index
        return self._runner.inspect("swap_out", np.int32(row), padded)

    def out(self, row: int, logical: Sequence[int], pages: Sequence[int]) -> None:
        """Copy logical pages of a row into pages of the pool."""
        self._runner.programs.get("swap_out")  # a compilation is no part of the cost
        started = time.perf_counter()
        for i in range(0, len(logical), SWAP_WIDTH):
            blocks, _ = jax.device_get(self._gather(row, logical[i : i + SWAP_WIDTH]))
            self.pool.write(pages[i : i + SWAP_WIDTH], blocks)
        self._out.add(time.perf_counter() - started, len(logical))

    def begin_out(self, physical: Sequence[int]) -> list[Copy]:
        """Start copying physical pages, SWAP_WIDTH in each result; `finish_out` waits for it."""
        copies = [
            self._gather(self._runner.max_rows, physical[i : i + SWAP_WIDTH])
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

    def into(self, row: int, start: int, pages: Sequence[int], num_computed: int) -> int:
        """Fill a row's logical pages from `start` on with the content of pages of the pool; see `swap.swap_in`.

        Returns:
          the pages that were filled: all, or fewer where the device ran out.
        """
        self._runner.programs.get("swap_in")
        started, done = time.perf_counter(), 0
        while done < len(pages):
            part = pages[done : done + SWAP_WIDTH]
            end = start + done + len(part)
            ok = self._runner.apply(
                "swap_in",
                np.int32(row),
                np.int32(start + done),
                self.pool.read(part, SWAP_WIDTH),
                np.int32(len(part)),
                # Where a later part finds no page, the row stands at the end of this one.
                np.int32(min(num_computed, end * self._runner.page_size)),
            )
            if not ok:
                break
            done += len(part)
        self._in.add(time.perf_counter() - started, done)
        return done

    def begin_look(self) -> Any:
        """Start looking which cached pages are recycled next; `finish_look` waits for it."""
        return self._runner.inspect("look_ahead")

    def finish_look(self, look: Any) -> list[tuple[int, int]]:
        """(physical page, generation) of what `begin_look` saw, the first one first."""
        ids, generations = jax.device_get(look)
        real = ids <= self._runner.num_usable_pages
        return list(zip(ids[real].tolist(), generations[real].tolist(), strict=True))
