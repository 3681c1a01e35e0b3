"""Lengths, times, conversations and traces."""

import json

import numpy as np
import pytest

from pagedjax.simulate import (
    ALPACA,
    SHAREGPT,
    LengthModel,
    Workload,
    arrivals,
    calibrated,
    conversations,
    independent,
    preset_named,
    read_trace,
)


@pytest.mark.parametrize(("model", "prompt", "output"), [(SHAREGPT, 161.31, 337.99), (ALPACA, 19.31, 58.45)])
def test_lengths_have_the_published_means(model, prompt, output):
    p, o = model.sample(200_000, np.random.default_rng(5))
    assert p.mean() == pytest.approx(prompt, rel=0.02)
    assert o.mean() == pytest.approx(output, rel=0.02)
    assert (p + o).max() < 2048
    assert min(p.min(), o.min()) >= 1


def test_sharegpt_outputs_spread_as_figure_2_says():
    """Token states over reservation, 1 + 2 E[p] E[o] / E[o^2]: 1.53 for Orca Max and 1.52 for Oracle in the paper."""
    p, o = (x.astype(float) for x in SHAREGPT.sample(200_000, np.random.default_rng(6)))
    assert 1 + 2 * p.mean() * o.mean() / (o**2).mean() == pytest.approx(20.4 / 13.3, abs=0.04)


@pytest.mark.parametrize("cv", [0.0, 1.0, 3.0])
def test_arrivals_have_rate_and_burstiness(cv):
    times = arrivals(100_000, 4.0, np.random.default_rng(1), cv)
    gaps = np.diff(times.astype(float))
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03, abs=0.01)


def test_a_workload_at_another_rate():
    workload = independent(200, 2.0, seed=3).at_rate(8.0)
    assert 199 / float(workload.arrival[-1] - workload.arrival[0]) == pytest.approx(8.0, rel=1e-4)
    assert np.array_equal(workload.output, independent(200, 2.0, seed=3).output)


def test_a_turn_begins_with_all_that_was_said():
    workload = conversations(300, 1.0, seed=2, max_prompt=1024, max_output=1024, new=0.3)
    so_far = {}
    cut = 0
    for i in range(300):
        stream = int(workload.stream[i])
        whole = int(workload.offset[i] + workload.prompt[i])
        assert whole > so_far.get(stream, 0)  # there is a question
        assert workload.prompt[i] == min(whole, 1024)
        cut += workload.offset[i] > 0
        so_far[stream] = whole + int(workload.output[i])
    assert cut
    assert len(so_far) < 300


def test_a_trace_is_read_in_order_of_arrival(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [dict(arrival=2.0, prompt=5, output=6, tenant=1), dict(arrival=0.5, prompt=7, output=8, deadline=1.5)]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    workload = read_trace(path)
    assert workload.arrival.tolist() == [0.5, 2.0]
    assert workload.prompt.tolist() == [7, 5]
    assert workload.tenant.tolist() == [0, 1]
    assert workload.deadline.tolist() == [1.5, np.inf]
    assert workload.stream.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "1: not JSON"),
        ("[]", "1: lacks arrival, prompt, output"),
        ('{"arrival": 0, "prompt": 1}', "1: lacks output"),
        ('{"arrival": 0, "prompt": 1, "output": 1, "size": 2}', "unknown field 'size'"),
        ('{"arrival": 0, "prompt": "x", "output": 1}', "prompt: must be a number, got 'x'"),
        ('{"arrival": 0, "prompt": 0, "output": 1}', "prompt: must be at least 1, got 0 for request 0"),
        ("", "no requests"),
    ],
)
def test_a_bad_trace_is_named(tmp_path, line, message):
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=message):
        read_trace(path)


def test_arrays_of_a_workload_are_checked():
    with pytest.raises(ValueError, match=r"output: must have shape \(2,\), got \(1,\)"):
        Workload(arrival=[0, 1], prompt=[1, 1], output=[1])
    with pytest.raises(ValueError, match=r"arrival: must be in ascending order, got 0\.0 for request 1"):
        Workload(arrival=[1, 0], prompt=[1, 1], output=[1, 1])
    with pytest.raises(ValueError, match="prefix_tokens: must be at most the prompt's, got 3 for request 0"):
        Workload(arrival=[1], prompt=[2], output=[1], prefix_tokens=[3])
    with pytest.raises(ValueError, match="rate: must be above 0, got 0"):
        independent(2, 0)
    with pytest.raises(ValueError, match="lengths: must be one of sharegpt, alpaca, got 'x'"):
        independent(2, 1, "x")


def test_lengths_of_ones_own():
    prompt, output = LengthModel(10, 20, 0.1, 0.1, max_total=64).sample(5000, np.random.default_rng(0))
    assert prompt.mean() == pytest.approx(10, rel=0.05)
    assert output.mean() == pytest.approx(20, rel=0.05)


def test_opt_13b_on_an_a100():
    """26 GB at 80 % of 1.555 TB/s, 800 KiB a token, 25 GB/s to the host; 983 pages of 16 tokens in 12 GiB."""
    preset = preset_named("a100-opt-13b")
    assert preset.cost.weights == pytest.approx(26e9 / (0.8 * 1.555e12))
    assert preset.cost.per_context == pytest.approx(819_200 / (0.8 * 1.555e12))
    assert preset.cost.per_moved == pytest.approx(819_200 / 25e9)
    assert preset.cache_bytes // (16 * preset.model.kv_bytes) == 983
    with pytest.raises(ValueError, match=r"preset: must be one of a100-opt-13b, .*got 'x'"):
        preset_named("x")


def test_a_measured_step_costs_what_was_measured(tmp_path):
    figures = {"whole step": 101.0, "linear layers": 54.0, "attention": 24.0, "head": 9.0, "sampling": 1.0}
    path = tmp_path / "step.json"
    path.write_text(json.dumps({"rows": 64, "context": 192, "figures": figures}))
    cost = calibrated(path)
    step = cost.fixed + max(cost.weights, 64 * cost.per_token) + 64 * 192 * cost.per_context
    assert step == pytest.approx(0.101)
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"not a file of scripts/bench_step.py: 'rows' is missing"):
        calibrated(path)
