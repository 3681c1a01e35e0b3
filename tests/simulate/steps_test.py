"""Iteration by iteration: who runs, in what pages; and that jumps and mapping change nothing."""

import dataclasses

import jax
import numpy as np
import pytest

from pagedjax.pages import check
from pagedjax.simulate.result import read_result
from pagedjax.simulate.run import _shapes, advance, start, sweep
from tests.simulate.cases import PAGED, oracle_of, workload

CONFIGS = [PAGED(), PAGED(preemption="swap"), PAGED(policy="shortest_prefix")]
FIELDS = ("finished", "first_admitted", "first_iteration", "last_iteration", "preemptions", "cached")


def lane(state, i):
    return jax.tree.map(lambda x: np.asarray(x)[i], state)


def test_every_iteration_has_the_requests_and_pages_of_the_oracle():
    runs = [(config, workload(70 + i)) for i, config in enumerate(CONFIGS)]
    shape = dataclasses.replace(_shapes(runs)[0], max_jump=1)
    stacked, state = start(shape, runs)
    longest = max(load.max_total for _, load in runs)
    oracles = [oracle_of(config, load, longest) for config, load in runs]
    logs, seen = [[] for _ in runs], [0] * len(runs)
    left, trips = True, 0
    while left:
        state, left, _ = advance(shape, stacked, state, 1)
        trips += 1
        for i, log in enumerate(logs):
            now = lane(state, i)
            if int(now.iteration) > seen[i]:
                seen[i] = int(now.iteration)
                slots = now.slots.request
                log.append((sorted(slots[slots < shape.num_requests].tolist()), int(now.memory.num_unowned)))
        if trips % 16 == 0:
            assert check(lane(state, trips // 16 % len(runs)).memory) == []
    for i, (log, oracle) in enumerate(zip(logs, oracles, strict=True)):
        assert log == [(ranks, free) for ranks, _, free in oracle.log]
        assert check(lane(state, i).memory) == []
    stepped = [read_result(*run, lane(state, i)) for i, run in enumerate(runs)]
    jumped = sweep(runs, progress=False)
    for one, other in zip(stepped, jumped, strict=True):
        for name in FIELDS:
            assert np.array_equal(getattr(one, name), getattr(other, name)), name
        assert one.iterations == other.iterations
        np.testing.assert_allclose(one.latency, other.latency, rtol=1e-5)
        assert one.waste() == pytest.approx(other.waste(), rel=1e-4)
        assert other.trips < one.trips


def test_one_run_alone_is_the_same_as_mapped():
    """Bit for bit: the same program over a batch of one."""
    runs = [(config, workload(80 + i)) for i, config in enumerate(CONFIGS)]
    together = sweep(runs, progress=False)
    shape = _shapes(runs)[0]
    for run, want in zip(runs[1:2], together[1:2], strict=True):
        stacked, state = start(shape, [run])
        left = True
        while left:
            state, left, _ = advance(shape, stacked, state, 128)
        alone = read_result(*run, lane(state, 0))
        for name in (*FIELDS, "latency", "first_token"):
            assert np.array_equal(getattr(alone, name), getattr(want, name)), name
        assert alone.seconds == want.seconds
        for name, values in alone.bins.items():
            np.testing.assert_allclose(values, want.bins[name], rtol=1e-6, err_msg=name)
