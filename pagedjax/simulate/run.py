"""Runs simulations: one, or hundreds of them mapped over in one program."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from tqdm import tqdm

from pagedjax.pages.baselines import reservation
from pagedjax.policy import POLICIES
from pagedjax.simulate.config import SimConfig
from pagedjax.simulate.cost import StepCost
from pagedjax.simulate.iterate import trip
from pagedjax.simulate.result import Result, read_result
from pagedjax.simulate.state import FINISHED, Run, Shape, State, init_state, is_active
from pagedjax.simulate.workload import Workload

TRIPS_AT_ONCE = 128
"""Trips between two looks of the progress bar."""

MAX_AT_ONCE = 256
"""Runs in one program; more go one batch after the other."""

SHOW_AFTER_SECONDS = 2.0


def simulate(config: SimConfig, workload: Workload, *, progress: bool = False) -> Result:
    """One run."""
    return sweep([(config, workload)], progress=progress)[0]


def sweep(runs: Iterable[tuple[SimConfig, Workload]], *, progress: bool = True) -> list[Result]:
    """Many runs. Those that need the same program are mapped over, whatever their rates, seeds, policies, reservations, costs.

    A program is compiled for each allocator, page size, number of pages, samples, and the two ways of prefill and caching.
    Shorter workloads are padded to the longest.

    Returns:
      A result for each run, in their order.

    Raises:
      ValueError: a request that does not fit, alone, into the memory or into max_model_len.
    """
    wanted = list(runs)
    for config, workload in wanted:
        _check_fits(config, workload)
    groups: dict[Shape, list[int]] = {}
    for index, shape in enumerate(_shapes(wanted)):
        groups.setdefault(shape, []).append(index)
    results: dict[int, Result] = {}
    total = sum(workload.num_requests for _, workload in wanted)
    with tqdm(
        total=total, desc="Simulating", unit=" requests", delay=SHOW_AFTER_SECONDS, leave=False, disable=not progress
    ) as bar:
        for shape, members in groups.items():
            for first in range(0, len(members), MAX_AT_ONCE):
                part = members[first : first + MAX_AT_ONCE]
                for index, result in zip(part, _run_batch(shape, [wanted[i] for i in part], bar), strict=True):
                    results[index] = result
    return [results[index] for index in range(len(wanted))]


def _run_batch(shape: Shape, members: Sequence[tuple[SimConfig, Workload]], bar: tqdm) -> list[Result]:
    stacked, state = start(shape, members)
    before = sum(workload.num_requests for _, workload in members)
    padded = len(members) * shape.num_requests
    seen = 0
    while True:
        state, left, finished = advance(shape, stacked, state, TRIPS_AT_ONCE)
        done = int(finished) - (padded - before)
        bar.update(done - seen)
        seen = done
        if not bool(left):
            break
    bar.update(before - seen)  # those that the horizon cut off
    host = jax.device_get(state.replace(memory=None))
    return [
        read_result(config, workload, jax.tree.map(lambda x, i=i: x[i], host))
        for i, (config, workload) in enumerate(members)
    ]


def start(shape: Shape, members: Sequence[tuple[SimConfig, Workload]]) -> tuple[Run, State]:
    """The parameters and first states of runs of one shape, stacked [B, ...]."""
    runs = [make_run(shape, config, workload) for config, workload in members]
    stacked: Run = jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *runs)
    return stacked, _init(shape, stacked)


@functools.partial(jax.jit, static_argnums=0)
def _init(shape: Shape, runs: Run) -> State:
    return jax.vmap(functools.partial(init_state, shape))(runs)


@functools.partial(jax.jit, static_argnums=(0, 3), donate_argnums=2)
def advance(shape: Shape, runs: Run, states: State, trips: int) -> tuple[State, jax.Array, jax.Array]:
    """Up to so many trips of all runs [B, ...] at once; those that are done stand still.

    Returns:
      states (donated), bool whether any is left to do, i32 requests that are finished or padded.
    """

    def active(states: State) -> jax.Array:
        return jnp.any(jax.vmap(is_active)(runs, states))

    def body(carry: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
        count, states = carry
        return count + 1, jax.vmap(functools.partial(trip, shape))(runs, states)

    # One predicate for all: with one for each, every trip would select between two copies of the state.
    _, states = lax.while_loop(lambda c: (c[0] < trips) & active(c[1]), body, (jnp.int32(0), states))
    return states, active(states), jnp.sum(states.requests.status == FINISHED, dtype=jnp.int32)


def _shapes(runs: Sequence[tuple[SimConfig, Workload]]) -> list[Shape]:
    """The program that each run needs; sizes that need not be equal are made so, to need few programs."""
    Q = max(workload.num_requests for _, workload in runs)
    longest = max(workload.max_total for _, workload in runs)
    tenants = max(int(workload.tenant.max()) + 1 for _, workload in runs)
    most = {c.family: 1 for c, _ in runs}
    for config, _ in runs:
        most[config.family] = max(most[config.family], config.max_running)
    return [
        Shape(
            family=config.family,
            page_size=config.page_size,
            num_pages=config.total_pages,
            num_slots=min(most[config.family], max(config.total_pages, 1), Q),
            samples=config.samples,
            pages_per_row=-(-(config.max_model_len if config.family == "buddy" else longest) // config.page_size),
            num_requests=Q,
            num_tenants=tenants if any(c.policy == "fair_share" for c, _ in runs) else 1,
            prefix_caching=config.prefix_caching,
            chunked_prefill=config.chunked_prefill,
            beams=config.beams,
        )
        for config, _ in runs
    ]


def make_run(shape: Shape, config: SimConfig, workload: Workload) -> Run:
    """One run's parameters as NumPy arrays, padded to the shape's number of requests."""
    pad = shape.num_requests - workload.num_requests
    columns = {field.name: np.pad(getattr(workload, field.name), (0, pad)) for field in dataclasses.fields(workload)}
    columns["deadline"] = columns["arrival"] + columns["deadline"]
    if shape.num_tenants == 1:
        columns["tenant"] = np.zeros_like(columns["tenant"])
    asked = np.zeros(workload.num_requests, np.int32)
    if config.reservation:
        asked = reservation(config.reservation, workload.prompt, workload.output, config.max_model_len)
    at_once = config.scheme == "faster_transformer"
    scalars: dict[str, Any] = dict(
        policy=np.int32(list(POLICIES).index(config.policy)),
        growth_share=np.float32(config.growth_share),
        max_running=np.int32(config.max_running),
        # FasterTransformer computes all prompts of a batch in one step.
        budget=np.int32(2**30 if at_once else config.max_num_batched_tokens),
        request_level=np.bool_(at_once),
        swap=np.bool_(config.preemption == "swap"),
        host_pages=np.int32(config.total_host_pages),
        horizon=np.float32(config.end),
    )
    cost: Any = StepCost(*(np.float32(value) for value in config.cost))
    return Run(**columns, **scalars, asked=np.pad(asked, (0, pad)), cost=cost)  # type: ignore[arg-type]


def _check_fits(config: SimConfig, workload: Workload) -> None:
    """A request that cannot run alone would wait for ever."""
    if workload.max_total > config.max_model_len:
        raise ValueError(
            f"workload: a request of {workload.max_total} tokens is longer than max_model_len, {config.max_model_len}"
        )
    size, n = config.page_size, config.samples
    if config.family == "buddy":
        tokens = reservation(config.reservation, workload.prompt, workload.output, config.max_model_len)
        units = -(-int(tokens.max()) // size)
        largest = 1 << min((-(-config.max_model_len // size) - 1).bit_length(), config.total_pages.bit_length() - 1)
        if units > largest or n * (1 << (units - 1).bit_length()) > config.total_pages:
            raise ValueError(f"workload: {n} chunks of {units} units each do not fit into {config.total_pages} units")
        return
    shared = workload.prompt // size if config.family == "paged" and n > 1 else np.zeros_like(workload.prompt)
    pages = -(-(workload.prompt + workload.output) // size)
    worst = int((shared + n * (pages - shared)).max()) + (n if config.beams else 0)
    if worst > config.total_pages:
        raise ValueError(f"workload: a request needs {worst} pages, there are {config.total_pages}")
