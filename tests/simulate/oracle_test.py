"""The simulator against plain Python: whole numbers exactly, times to 1e-5, for every scheme."""

import functools

import numpy as np
import pytest

from pagedjax.simulate import sweep
from tests.simulate.cases import PAGED, oracle_of, workload

CASES = {
    "paged": [PAGED(), PAGED(preemption="swap"), PAGED(preemption="swap", host_pages=2), PAGED(growth_share=0.5)]
    + [PAGED(policy=name) for name in ("priority", "shortest_prefix", "earliest_deadline")],
    "chunked": [
        PAGED(chunked_prefill=True, max_num_batched_tokens=12, policy=p)
        for p in ("first_come", "priority", "fair_share")
    ],
    "samples": [PAGED(samples=3, num_pages=40), PAGED(samples=3, num_pages=40, preemption="swap")],
    "beams": [PAGED(samples=3, num_pages=44, beams=((0, 0, 1), (2, 1, 0), (1, 1, 1), (0, 1, 2)))],
    "cached": [PAGED(prefix_caching=True), PAGED(prefix_caching=True, policy="fair_share")],
    "chunks": [PAGED(scheme="chunks"), PAGED(scheme="chunks", preemption="swap")],
    "buddy": [PAGED(scheme=s) for s in ("orca_max", "orca_pow2", "orca_oracle", "faster_transformer")],
}
WITH_SAMPLES = {
    "cached samples": [PAGED(prefix_caching=True, samples=2, num_pages=40, chunked_prefill=True)],
    "chunks samples": [PAGED(scheme="chunks", samples=2, num_pages=40)],
    "buddy samples": [PAGED(scheme="orca_pow2", samples=2, num_pages=37)],
}


def runs_of(case):
    alike = case.startswith("cached")
    return [
        (config, workload(i + 10 * len(case), alike=alike)) for i, config in enumerate({**CASES, **WITH_SAMPLES}[case])
    ]


def compare(result, oracle):
    jobs = oracle.jobs
    for name in ("first_admitted", "first_iteration", "last_iteration", "preemptions", "cached"):
        assert getattr(result, name).tolist() == [getattr(job, name) for job in jobs], name
    for name in ("swapped_out", "swapped_in", "recomputed"):
        assert getattr(result, name) == getattr(oracle, name), name
    assert result.iterations == oracle.iteration
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5)
    close(result.first_token, [job.first_token for job in jobs])
    close(result.latency, [job.latency for job in jobs])
    close(result.seconds, oracle.now)
    close(result.bins["running"].sum(), oracle.running_seconds)
    for name in ("tokens", "reserved", "internal"):
        close(result.bins[name].sum(), oracle.sums[name] / (oracle.U * oracle.S), err_msg=name, atol=1e-4)
    for name in ("mapped", "distinct") if oracle.grows else ():
        close(result.bins[name].sum(), oracle.sums[name], err_msg=name)


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in WITH_SAMPLES)])
def test_a_mapped_sweep_agrees_with_plain_python(case):
    runs = runs_of(case)
    results = sweep(runs, progress=False)
    longest = max(load.max_total for _, load in runs)
    oracles = [oracle_of(config, load, longest) for config, load in runs]
    for result, oracle in zip(results, oracles, strict=True):
        compare(result, oracle)
    if case == "paged":
        assert all(max(job.preemptions for job in oracle.jobs) for oracle in oracles[:3])
        assert oracles[1].swapped_in == oracles[1].swapped_out > 0
        assert oracles[2].swapped_out == oracles[2].swapped_in > 0
        assert oracles[2].recomputed > 0
    if case == "beams":
        assert 0 < oracles[0].sums["distinct"] < oracles[0].sums["mapped"]
    if case.startswith("cached"):
        assert all(sum(job.cached for job in oracle.jobs) for oracle in oracles)
