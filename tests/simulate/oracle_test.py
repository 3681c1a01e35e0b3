"""The simulator against plain Python: whole numbers exactly, times to 1e-5, for every scheme."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.pages import Pages, check
from pagedjax.simulate import SimConfig, Workload, collapsing_beams, simulate, sweep
from pagedjax.simulate import run as running
from pagedjax.simulate.state import RUNNING, init_state
from tests.oracles.simulate_oracle import SimulateOracle

Q, LONGEST = 24, 40


def workload(seed, *, prefixes=False, turns=False):
    """Small requests that arrive faster than they are served."""
    rng = np.random.default_rng(seed)
    prompt, output = rng.integers(1, 16, Q), rng.integers(1, 17, Q)
    prefix_tokens, stream, offset = np.zeros(Q), np.arange(Q), np.zeros(Q)
    if prefixes:
        prefix_tokens = rng.choice([0, 8, 9], Q)
        prompt = prompt + prefix_tokens
    if turns:
        stream = rng.integers(0, 4, Q)
    return Workload(
        arrival=np.cumsum(rng.exponential(0.03, Q)),
        prompt=prompt,
        output=output,
        prefix=rng.integers(0, 2, Q),
        prefix_tokens=prefix_tokens,
        stream=stream,
        offset=offset,
        priority=rng.integers(0, 3, Q),
        tenant=rng.integers(0, 3, Q),
        deadline=rng.choice([0.5, 1.0, np.inf], Q),
    )


SMALL = dict(page_size=4, num_pages=24, max_model_len=48, max_running=8, max_num_batched_tokens=40)
PAGED = functools.partial(SimConfig, **SMALL)
CASES = {
    "paged": [PAGED(), PAGED(preemption="swap"), PAGED(preemption="swap", host_pages=5), PAGED(growth_share=0.5)]
    + [PAGED(policy=name) for name in ("priority", "shortest_prefix", "earliest_deadline")],
    "chunked": [PAGED(chunked_prefill=True, max_num_batched_tokens=12, policy=p) for p in ("first_come", "priority")],
    "fair": [PAGED(policy="fair_share"), PAGED(policy="fair_share", growth_share=1.0)],
    "samples": [PAGED(samples=3, num_pages=40), PAGED(samples=3, num_pages=40, preemption="swap")],
    "beams": [PAGED(samples=3, num_pages=44, beams=((0, 0, 1), (2, 1, 0), (1, 1, 1), (0, 1, 2)))],
    "cached": [PAGED(prefix_caching=True), PAGED(prefix_caching=True, num_pages=24, policy="fair_share")],
    "cached samples": [PAGED(prefix_caching=True, samples=2, num_pages=40, chunked_prefill=True)],
    "chunks": [PAGED(scheme="chunks"), PAGED(scheme="chunks", preemption="swap")],
    "chunks samples": [PAGED(scheme="chunks", samples=2, num_pages=40)],
    "buddy": [PAGED(scheme=s) for s in ("orca_max", "orca_pow2", "orca_oracle", "faster_transformer")],
    "buddy samples": [PAGED(scheme="orca_pow2", samples=2, num_pages=37)],
}


def runs_of(case):
    like = dict(prefixes="cached" in case, turns="cached" in case)
    configs = [dataclass_with_cost(config) for config in CASES[case]]
    return [(config, workload(i + 10 * len(case), **like)) for i, config in enumerate(configs)]


def dataclass_with_cost(config):
    return config


def oracle_of(config, load, longest):
    slots = min(config.max_running, config.total_pages, Q)
    tokens = config.max_model_len if config.family == "buddy" else longest
    return SimulateOracle(config, load, slots, -(-tokens // config.page_size)).run()


def compare(result, oracle):
    jobs = oracle.jobs
    for name in ("first_admitted", "first_iteration", "last_iteration", "preemptions", "cached"):
        assert getattr(result, name).tolist() == [getattr(job, name) for job in jobs], name
    assert result.iterations == oracle.iteration
    for name in ("swapped_out", "swapped_in", "recomputed"):
        assert getattr(result, name) == getattr(oracle, name), name
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5)
    close(result.first_token, [job.first_token for job in jobs])
    close(result.latency, [job.latency for job in jobs])
    close(result.seconds, oracle.now)
    close(result.bins["running"].sum(), oracle.running_seconds)
    slots = oracle.U * oracle.S
    for name in ("tokens", "reserved", "internal"):
        close(result.bins[name].sum(), oracle.sums[name] / slots, err_msg=name, atol=1e-4)
    if oracle.grows:
        for name in ("mapped", "distinct"):
            close(result.bins[name].sum(), oracle.sums[name], err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_a_mapped_sweep_agrees_with_plain_python(case):
    runs = runs_of(case)
    results = sweep(runs, progress=False)
    longest = max(load.max_total for _, load in runs)
    oracles = [oracle_of(config, load, longest) for config, load in runs]
    for result, oracle in zip(results, oracles, strict=True):
        compare(result, oracle)
    if case == "paged":
        assert all(oracle.jobs and max(job.preemptions for job in oracle.jobs) for oracle in oracles[:3])
        assert oracles[1].swapped_in == oracles[1].swapped_out > 0
        assert 0 < oracles[2].swapped_out < oracles[1].swapped_out
    if case.startswith("cached"):
        assert all(sum(job.cached for job in oracle.jobs) for oracle in oracles)
