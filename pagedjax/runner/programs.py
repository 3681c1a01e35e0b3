"""Every program the engine runs, compiled ahead of time, once a shape."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.stages import Lowered
from tqdm import tqdm

from pagedjax.models import ModelSpec
from pagedjax.pages import Pages, PageStats, Usage, stats, usage
from pagedjax.pages.capacity import PAGED, Allocation
from pagedjax.runner.buckets import Buckets
from pagedjax.runner.decode import decode_loop
from pagedjax.runner.fork import Fork, fork, pick
from pagedjax.runner.lifecycle import Admission, admit, compact_pages, score_prompt, settle
from pagedjax.runner.reorder import reorder
from pagedjax.runner.state import EngineState
from pagedjax.runner.step import Params, mixed_step
from pagedjax.runner.swap import SWAP_WIDTH, look_ahead, swap_in, swap_out
from pagedjax.sampling import RowSampling, init_row_sampling
from pagedjax.types import MAX_BEAM_WIDTH

ADMIT_WIDTH = 8
"""Sequences admitted or settled in one dispatch."""

Key = tuple  # the name, then static sizes


def _like(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _flags(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bool_)


@contextlib.contextmanager
def _held_back(logger: logging.Logger) -> Iterator[None]:
    """Log lines that come while a progress bar is drawn appear after it."""
    records: list[logging.LogRecord] = []

    def hold(record: logging.LogRecord) -> bool:
        records.append(record)
        return False

    logger.addFilter(hold)
    try:
        yield
    finally:
        logger.removeFilter(hold)
        for record in records:
            logger.handle(record)


class Programs:
    """Compiled programs by (name, static sizes). Compiles at `warm_up`, or at first use.

    Args:
      graph, params: the model, split by `nnx.split`.
      state: an EngineState of the right shapes.
      buckets: sizes to compile for.
      buffer_steps: most decode steps of one dispatch.
      backend: attention backend.
      swaps: pages may go to the host and come back.
      allocation: when rows get pages.
    """

    def __init__(
        self,
        graph: nnx.GraphDef,
        params: Params,
        state: EngineState,
        spec: ModelSpec,
        *,
        buckets: Buckets,
        buffer_steps: int,
        backend: str,
        score_prompts: bool = True,
        swaps: bool = False,
        allocation: Allocation = PAGED,
    ) -> None:
        self._graph, self._backend, self._buffer_steps = graph, backend, buffer_steps
        self._windows, self._allocation = spec.groups.windows, allocation
        self._params, self._state = _like(params), _like(state)
        self._spec, self._dtype = spec, jax.tree.leaves(params)[0].dtype
        self._buckets = buckets
        self._score_prompts, self._swaps = score_prompts, swaps
        self.compiler_options: dict[str, bool | int | str] | None = None  # XLA's, for programs yet to be compiled
        self._compiled: dict[Key, Callable] = {}

    def keys(self) -> list[Key]:
        """All programs that serving can need."""
        admit = "admit_reserving" if self._allocation.reserve else "admit"
        keys: list[Key] = [(admit,), ("settle",), ("stats",), ("fork",), ("reorder",)]
        keys += [("pick", t) for t in self._token_sizes()]
        keys += [("decode", b) for b in self._buckets.lanes]
        keys += [("mixed", t, b) for t, b in self._buckets.tokens]
        if self._score_prompts:
            keys += [("score", t) for t in self._token_sizes()]
        if self._swaps:
            keys += [("swap_out",), ("swap_in",), ("look_ahead",)]
        return keys

    def _token_sizes(self) -> list[int]:
        return sorted({t for t, _ in self._buckets.tokens})

    def warm_up(self, *, progress: bool = True) -> None:
        """Compile everything, behind a progress bar."""
        missing: Iterable[Key] = [key for key in self.keys() if key not in self._compiled]
        bar = tqdm(missing, desc="Preparing programs", unit="program", disable=not progress, leave=True)
        with _held_back(logging.getLogger("pagedjax_kernels")):
            for key in bar:
                bar.set_postfix_str(" ".join(map(str, key)))
                self.get(*key)

    def get(self, name: str, *sizes: int) -> Callable:
        """The compiled program; takes the arguments of the function of that name less its static ones and `graph`."""
        key = (name, *sizes)
        if key not in self._compiled:
            self._compiled[key] = getattr(self, f"_lower_{name}")(*sizes).compile(self.compiler_options)
        return self._compiled[key]

    def _row_sampling(self, num_rows: int) -> RowSampling:
        return _like(jax.eval_shape(lambda: init_row_sampling(num_rows, self._spec.vocab_size)))

    def _hidden(self, num_tokens: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_tokens, self._spec.hidden_size), self._dtype)

    def _lower_admit_reserving(self) -> Lowered:
        return self._lower_admit(reserves=True)

    def _lower_admit(self, *, reserves: bool = False) -> Lowered:
        C, M = ADMIT_WIDTH, self._state.rows.token_ids.shape[1]
        new = Admission(
            rows=_ints(C),
            token_ids=_ints(C, M),
            num_tokens=_ints(C),
            prompt_lens=_ints(C),
            max_tokens=_ints(C),
            match_tokens=_ints(C),
            namespaces=_ints(C),
            num_reserved=_ints(C),
            sampling=self._row_sampling(C),
            uses_counts=_flags(C),
        )
        fn = functools.partial(admit, windows=self._windows, reserves=reserves)
        return jax.jit(fn, donate_argnums=0).lower(self._state, new)

    def _lower_fork(self) -> Lowered:
        C = ADMIT_WIDTH
        new = Fork(
            rows=_ints(C),
            sources=_ints(C),
            num_tokens=_ints(C),
            num_computed=_ints(C),
            prompt_lens=_ints(C),
            max_tokens=_ints(C),
            samples=_flags(C),
            sampling=self._row_sampling(C),
            uses_counts=_flags(C),
        )
        fn = functools.partial(fork, self._graph)
        return jax.jit(fn, donate_argnums=1).lower(self._params, self._state, self._hidden(C), new)

    def _lower_reorder(self) -> Lowered:
        C = MAX_BEAM_WIDTH
        fn = jax.jit(reorder, donate_argnums=0)
        return fn.lower(self._state, _ints(C), _ints(C), _ints(C), _ints(C))

    def _lower_pick(self, num_tokens: int) -> Lowered:
        return jax.jit(pick).lower(self._hidden(num_tokens), _ints(ADMIT_WIDTH))

    def _lower_settle(self) -> Lowered:
        C = ADMIT_WIDTH
        fn = jax.jit(functools.partial(settle, windows=self._windows), donate_argnums=0)
        return fn.lower(self._state, _ints(C), _ints(C), _ints(C), _flags(C))

    def _lower_compact(self) -> Lowered:
        return jax.jit(compact_pages, donate_argnums=0).lower(self._state)

    def _lower_stats(self) -> Lowered:
        rows = self._state.rows

        def page_stats(pages: Pages, num_computed: jax.Array, max_tokens: jax.Array) -> tuple[PageStats, Usage]:
            # The keys and values of the last token that a row can have are never needed.
            return stats(pages), usage(pages, num_computed, max_tokens - 1)

        return jax.jit(page_stats).lower(self._state.pages, rows.num_computed, rows.max_tokens)

    def _lower_swap_out(self) -> Lowered:
        return jax.jit(swap_out).lower(self._state, _ints(), _ints(SWAP_WIDTH), _ints(SWAP_WIDTH))

    def _lower_swap_in(self) -> Lowered:
        index = _ints(SWAP_WIDTH)
        blocks, _ = jax.eval_shape(swap_out, self._state, _ints(), index, index)
        fn = jax.jit(functools.partial(swap_in, windows=self._windows), donate_argnums=0)
        return fn.lower(self._state, _ints(), index, index, blocks, _ints(), _ints())

    def _lower_look_ahead(self) -> Lowered:
        return jax.jit(look_ahead).lower(self._state)

    def _lower_decode(self, num_lanes: int) -> Lowered:
        fn = functools.partial(
            decode_loop,
            self._graph,
            buffer_steps=self._buffer_steps,
            backend=self._backend,
            windows=self._windows,
            chunk_pages=self._allocation.chunk_pages,
        )
        return jax.jit(fn, donate_argnums=1).lower(
            self._params, self._state, _ints(num_lanes), _ints(num_lanes), _ints(), _flags()
        )

    def _lower_mixed(self, num_tokens: int, num_lanes: int) -> Lowered:
        fn = functools.partial(
            mixed_step,
            self._graph,
            num_tokens=num_tokens,
            backend=self._backend,
            windows=self._windows,
            chunk_pages=self._allocation.chunk_pages,
        )
        return jax.jit(fn, donate_argnums=1).lower(self._params, self._state, _ints(num_lanes), _ints(num_lanes))

    def _lower_score(self, num_tokens: int) -> Lowered:
        fn = functools.partial(score_prompt, self._graph)
        return jax.jit(fn).lower(self._params, self._hidden(num_tokens), _ints(num_tokens))
