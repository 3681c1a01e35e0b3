"""Holds the device state and runs programs on it. The only place that pads host lists to compiled shapes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pagedjax.folders import cache_folder
from pagedjax.models import ModelSpec
from pagedjax.pages import PageStats, Usage, check, check_adjoining
from pagedjax.pages.capacity import PAGED, Allocation, Footprint
from pagedjax.runner.buckets import Buckets
from pagedjax.runner.compile_counter import CompileCounter
from pagedjax.runner.decode import DecodeReport, Trap
from pagedjax.runner.fork import Fork
from pagedjax.runner.lifecycle import Admission
from pagedjax.runner.messages import Flight, ForkedRow, LaneResult, NewRow, PublishedRow, Settlement
from pagedjax.runner.programs import ADMIT_WIDTH, Programs
from pagedjax.runner.rate import Rate
from pagedjax.runner.state import EngineState, RowStatus, init_state
from pagedjax.sampling import LogprobsOutput, SampleOutput, stack_rows
from pagedjax.types import MAX_BEAM_WIDTH


class Runner:
    """The device side of an engine. Not thread-safe: one thread calls it.

    Attributes:
      num_unowned: pages that nobody owns (free or cached), as of the last dispatch.
      num_page_copies: pages copied so far because a row was about to write into a shared one.
      max_len: longest sequence that a row holds.
      windows: tokens that a query sees, one entry a layer group; 0: all.
      allocation: when rows get pages.
      compilations: counts programs compiled in this process from the runner's creation on.
      mixed_rate: seconds per token of mixed steps.
    """

    def __init__(
        self,
        model: nnx.Module,
        spec: ModelSpec,
        *,
        num_pages: int,
        page_size: int,
        max_rows: int,
        max_len: int,
        cache_dtype: jnp.dtype,
        buckets: Buckets,
        buffer_steps: int,
        backend: str,
        secret: tuple[int, int],
        hash_bits: int = 32,
        swaps: bool = False,
        allocation: Allocation = PAGED,
    ) -> None:
        self.compilations = CompileCounter().start()
        self.page_size, self.num_usable_pages, self.max_rows = page_size, num_pages - 1, max_rows
        self.windows, self.allocation = spec.groups.windows, allocation
        footprint = Footprint(page_size, self.windows, allocation)
        self.max_len = footprint.longest(self.num_usable_pages, buckets.tokens[-1][0], max_len)
        self.buckets, self.buffer_steps = buckets, buffer_steps
        self._graph, self._params = nnx.split(model)
        self._hidden_size, self._params_dtype = spec.hidden_size, jax.tree.leaves(self._params)[0].dtype
        self._state = init_state(
            spec,
            num_pages=num_pages,
            page_size=page_size,
            max_rows=max_rows,
            max_len=self.max_len,
            cache_dtype=cache_dtype,
            secret=secret,
            hash_bits=hash_bits,
            chunk_pages=allocation.chunk_pages,
        )
        self.num_unowned, self.num_page_copies = self.num_usable_pages, 0
        self.programs = Programs(
            self._graph,
            self._params,
            self._state,
            spec,
            buckets=buckets,
            buffer_steps=buffer_steps,
            backend=backend,
            swaps=swaps,
            allocation=allocation,
        )
        self._step_seconds: dict[int, float] = {}
        self._last_read = 0.0
        self._dispatches = self._unowned_as_of = 0
        self.mixed_rate = Rate()

    def admit(self, new: Sequence[NewRow]) -> list[int | None]:
        """Fill in rows; returns, for each, the tokens that the prefix cache had, None where its pages were not to be had: it
        is to be released again."""
        hits: list[int | None] = []
        for i in range(0, len(new), ADMIT_WIDTH):
            part = new[i : i + ADMIT_WIDTH]
            admit = self.programs.get("admit_reserving" if self.allocation.reserve else "admit")
            self._state, out = admit(self._state, self._admission(part))
            found, ok, unowned = jax.device_get(out)
            hits += [int(h) if has_pages else None for h, has_pages, _ in zip(found, ok, part, strict=False)]
            self._note_unowned(unowned)
        return hits

    def _admission(self, new: Sequence[NewRow]) -> Admission:
        C = ADMIT_WIDTH
        token_ids = np.zeros((C, self.max_len), np.int32)
        for i, row in enumerate(new):
            token_ids[i, : len(row.token_ids)] = row.token_ids
        return Admission(
            rows=_padded([n.row for n in new], C, self.max_rows),
            token_ids=token_ids,
            num_tokens=_padded([len(n.token_ids) for n in new], C, 0),
            prompt_lens=_padded([n.prompt_len for n in new], C, 0),
            max_tokens=_padded([n.max_tokens for n in new], C, 0),
            match_tokens=_padded([n.match_tokens for n in new], C, 0),
            namespaces=_padded([n.namespace for n in new], C, 0),
            num_reserved=_padded([n.num_reserved for n in new], C, 0),
            sampling=stack_rows([n.sampling for n in new], C),
            uses_counts=_padded([n.uses_counts for n in new], C, 0).astype(bool),
        )

    def fork(self, new: Sequence[ForkedRow], hidden: jax.Array | None = None) -> list[LaneResult]:
        """Fork rows off; `hidden` of `mixed` where some of them sample their next token from it."""
        results: list[LaneResult] = []
        for i in range(0, len(new), ADMIT_WIDTH):
            part = new[i : i + ADMIT_WIDTH]
            self._state, report = self.programs.get("fork")(
                self._params, self._state, self._picked(part, hidden), self._forks(part)
            )
            report = jax.device_get(report)
            samples = jax.tree.map(lambda x: x[None], report.samples)
            results += [
                LaneResult(
                    row=f.row,
                    status=RowStatus(int(report.status[k])),
                    ok=True,
                    samples=_lane_samples(samples, k, int(f.hidden_index is not None)),
                )
                for k, f in enumerate(part)
            ]
        return results

    def _picked(self, new: Sequence[ForkedRow], hidden: jax.Array | None) -> jax.Array | np.ndarray:
        if hidden is None:
            assert all(f.hidden_index is None for f in new), "nothing to sample from"
            return np.zeros((ADMIT_WIDTH, self._hidden_size), self._params_dtype)
        index = _padded([f.hidden_index or 0 for f in new], ADMIT_WIDTH, 0)
        return self.programs.get("pick", hidden.shape[0])(hidden, index)

    def _forks(self, new: Sequence[ForkedRow]) -> Fork:
        def ints(values: list[int], fill: int = 0) -> np.ndarray:
            return _padded(values, ADMIT_WIDTH, fill)

        return Fork(
            rows=ints([f.row for f in new], self.max_rows),
            sources=ints([f.source for f in new], self.max_rows),
            num_tokens=ints([f.num_tokens for f in new]),
            num_computed=ints([f.num_computed for f in new]),
            prompt_lens=ints([f.prompt_len for f in new]),
            max_tokens=ints([f.max_tokens for f in new]),
            samples=ints([f.hidden_index is not None for f in new]).astype(bool),
            sampling=stack_rows([f.sampling for f in new], ADMIT_WIDTH),
            uses_counts=ints([f.uses_counts for f in new]).astype(bool),
        )

    def reorder(self, moves: Sequence[tuple[int, int, int, int]]) -> None:
        """Let rows become copies of others: (row, source row, tokens of the source to keep, the token after them) each,
        at most MAX_BEAM_WIDTH."""
        rows, sources, kept, tokens = zip(*moves, strict=True)
        C = MAX_BEAM_WIDTH
        self._state, unowned = self.programs.get("reorder")(
            self._state,
            _padded(rows, C, self.max_rows),
            _padded(sources, C, self.max_rows),
            _padded(kept, C, 0),
            _padded(tokens, C, 0),
        )
        self._note_unowned(unowned)

    @property
    def state(self) -> EngineState:
        """The device state, until the next program takes it."""
        return self._state

    def load_state(self, state: EngineState, *, num_unowned: int, num_page_copies: int) -> None:
        """Go on from another state of the same shapes, with no loop in flight."""
        self._state, self.num_page_copies = state, num_page_copies
        self._note_unowned(np.asarray(num_unowned))

    def apply(self, name: str, *args: Any) -> Any:
        """Run a program that takes the state and gives it back, with (a result, num_unowned); the result, on the host."""
        self._state, (out, unowned) = self.programs.get(name)(self._state, *args)
        self._note_unowned(unowned)
        return jax.device_get(out)

    def inspect(self, name: str, *args: Any) -> Any:
        """Run a program that only reads the state; what it returns stays on the device."""
        return self.programs.get(name)(self._state, *args)

    def settle(self, settlements: Sequence[Settlement]) -> list[PublishedRow]:
        """Publish and release rows. What was published is read from the device only where somebody looks at it."""
        C, published = ADMIT_WIDTH, list[PublishedRow]()
        for i in range(0, len(settlements), C):
            part = settlements[i : i + C]
            self._state, report = self.programs.get("settle")(
                self._state,
                _padded([s.row for s in part], C, self.max_rows),
                _padded([s.length for s in part], C, 0),
                _padded([s.namespace for s in part], C, 0),
                _padded([s.release for s in part], C, 0).astype(bool),
            )
            self._note_unowned(report.num_unowned)
            published += [PublishedRow(report, k) for k in range(len(part))]
        return published

    def mixed(self, lanes: Sequence[tuple[int, int]]) -> tuple[list[LaneResult], jax.Array]:
        """One step over (row, number of tokens) lanes in arrival order, those that decode first.

        Returns a result a lane, and the step's hidden states [T, d] for `score`.
        """
        total = sum(q for _, q in lanes)
        T, B = self.buckets.for_tokens(total, len(lanes))
        program = self.programs.get("mixed", T, B)
        started = time.perf_counter()
        self._state, report, hidden = program(
            self._params,
            self._state,
            _padded([row for row, _ in lanes], B, self.max_rows),
            _padded([q for _, q in lanes], B, 0),
        )
        report = jax.device_get(report)
        self.mixed_rate.add(time.perf_counter() - started, total)
        self._note_unowned(report.num_unowned)
        self.num_page_copies += int(report.num_copies)
        results = [
            LaneResult(
                row=row,
                status=RowStatus(int(report.status[i])),
                ok=bool(report.ok[i]),
                samples=_lane_samples(jax.tree.map(lambda x: x[None], report.samples), i, int(report.sampled[i])),
            )
            for i, (row, _) in enumerate(lanes)
        ]
        return results, hidden

    def score(self, hidden: jax.Array, next_ids: np.ndarray) -> LogprobsOutput:
        """Log-probabilities (numpy) of the tokens that follow the first positions of `hidden`."""
        T = hidden.shape[0]
        out = self.programs.get("score", T)(self._params, hidden, _padded(next_ids, T, 0))
        return jax.tree.map(lambda x: x[: len(next_ids)], jax.device_get(out))

    def start_decode(
        self, rows: Sequence[int], budgets: Sequence[int], *, max_steps: int, leave_on_finish: bool
    ) -> Flight:
        """Run rows (in arrival order) on the device until a trap, without waiting for it."""
        B = self.buckets.for_lanes(len(rows))
        started = time.perf_counter()
        self._state, report = self.programs.get("decode", B)(
            self._params,
            self._state,
            _padded(rows, B, self.max_rows),
            _padded(budgets, B, 0),
            np.int32(min(max_steps, self.buffer_steps)),
            np.bool_(leave_on_finish),
        )
        self._dispatches += 1
        return Flight(tuple(rows), B, max_steps, self._dispatches, started, report)

    def finish_decode(self, flight: Flight) -> tuple[Trap, list[LaneResult]]:
        """Wait for a loop and read what it brought. Loops are read in the order they were started in."""
        report: DecodeReport = jax.device_get(flight.report)
        now = time.perf_counter()
        # A loop that was started early began to run when the one before it was done.
        self._note_time(flight.num_lanes, now - max(flight.started, self._last_read), int(report.num_steps))
        self._last_read = now
        self._note_unowned(report.num_unowned, flight.dispatch)
        self.num_page_copies += int(report.num_copies)
        results = [
            LaneResult(
                row=row,
                status=RowStatus(int(report.status[i])),
                ok=True,
                samples=_lane_samples(report.samples, i, int(report.appended[i])),
            )
            for i, row in enumerate(flight.rows)
        ]
        return Trap(int(report.trap)), results

    def is_latest(self, flight: Flight) -> bool:
        """Whether no page can have changed hands since the loop ended."""
        return self._unowned_as_of <= flight.dispatch

    def _note_unowned(self, num_unowned: jax.Array | np.integer | np.ndarray, dispatch: int | None = None) -> None:
        """Take over a count of pages, unless a later dispatch has brought one already."""
        if dispatch is None:
            self._dispatches += 1
            dispatch = self._dispatches
        if dispatch > self._unowned_as_of:
            self.num_unowned, self._unowned_as_of = int(num_unowned), dispatch

    def _note_time(self, num_lanes: int, seconds: float, steps: int) -> None:
        if steps:
            last = self._step_seconds.get(num_lanes, seconds / steps)
            self._step_seconds[num_lanes] = 0.7 * last + 0.3 * seconds / steps

    def steps_within(self, num_rows: int, seconds: float) -> int:
        """Decode steps that fit in `seconds`, by the measured time of earlier ones; 1 before any was measured."""
        step = self._step_seconds.get(self.buckets.for_lanes(num_rows))
        return 1 if not step else max(1, min(self.buffer_steps, int(seconds / step)))

    def compact(self) -> tuple[float, float]:
        """Move pages so that each row lies in one piece; returns the contiguity before and after, 0 to 1.

        Compiled at first use. Nobody may know pages by number meanwhile: none may be pinned.
        """
        assert self.page_stats().pending == 0, "a pinned page must keep its number"
        self._state, (before, after) = self.programs.get("compact")(self._state)
        return float(before), float(after)

    def page_stats(self) -> PageStats:
        """Pages by state, as Python integers."""
        return self.page_counts()[0]

    def page_counts(self) -> tuple[PageStats, Usage]:
        """Pages by state, and what those in tables are used for, as Python integers."""
        rows = self._state.rows
        counts = self.programs.get("stats")(self._state.pages, rows.num_computed, rows.max_tokens)
        return jax.tree.map(int, jax.device_get(counts))

    def check(self) -> list[str]:
        """Broken page invariants; empty where all is well."""
        pages = jax.device_get(self._state.pages)
        broken = check(pages, windows=self.windows)
        return broken if self.allocation.is_paged else broken + check_adjoining(pages, self.allocation)

    def page_table(self) -> np.ndarray:
        """i32[G, R, P] a copy of the page table, for people to look at."""
        return np.asarray(jax.device_get(self._state.pages.table))

    def secret(self) -> bytes:
        """The words that seed the prefix hash; a snapshot keeps them."""
        return np.asarray(jax.device_get(self._state.pages.secret)).tobytes()

    def memory(self) -> dict[str, int]:
        """Bytes of weights, KV pages and page metadata."""
        size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))  # noqa: E731
        return {
            "weights": size(self._params),
            "kv_pages": size(self._state.cache),
            "metadata": size(self._state.pages) + size(self._state.rows),
        }


def _padded(values: Sequence[int] | np.ndarray, width: int, fill: int) -> np.ndarray:
    out = np.full(width, fill, np.int32)
    out[: len(values)] = values
    return out


def _lane_samples(samples: SampleOutput, lane: int, num: int) -> SampleOutput:
    """The first `num` samples of one lane out of fields [K, B, ...]."""
    return jax.tree.map(lambda x: x[:num, lane], samples)


def enable_compilation_cache(folder: str) -> None:
    """Keep compiled programs on disk, so that the next start does not compile them again. "auto": the user's cache folder."""
    if not folder:
        return
    path = cache_folder() / "compiled" if folder == "auto" else Path(folder)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
