"""Definitions of the metrics: examples computed by hand, and slow obvious counts."""

import json
import math
import random

import numpy as np
import pytest

from pagedjax.benchmarking import metrics, report
from pagedjax.benchmarking.metrics import compute_metrics
from pagedjax.benchmarking.outcome import Outcome


def outcome(start, ttft, itls, output_len, prompt_len=10, **more):
    latency = ttft + sum(itls)
    return Outcome(
        start=start,
        scheduled=start,
        ttft=ttft,
        latency=latency,
        itls=list(itls),
        num_chunks=1 + len(itls),
        prompt_len=prompt_len,
        output_len=output_len,
        counted_by="usage",
        **more,
    )


def by_hand():
    return [
        outcome(0.0, 0.5, [0.1, 0.3], 3, prompt_len=100),  # ends at 0.9
        outcome(0.2, 1.0, [0.2], 5, prompt_len=50, cached_tokens=32),  # two chunks with five tokens; ends at 1.4
        outcome(1.0, 0.25, [], 1, prompt_len=10),  # a single token; ends at 1.25
        Outcome(start=1.1, scheduled=0.9, latency=0.8, error="HTTP 429: full"),
    ]


def test_the_example_by_hand():
    m = compute_metrics(by_hand(), duration=2.0, percentiles=(50, 100), objectives={"ttft": 600, "tpot": 250})
    assert (m.completed, m.failed) == (3, 1)
    assert (m.total_input, m.total_output, m.cached_tokens) == (160, 9, 32)
    assert m.request_throughput == 1.5
    assert m.output_throughput == 4.5
    assert m.total_throughput == 84.5
    assert m.errors == {"HTTP 429: full": 1}
    assert m.tokens_per_chunk == 9 / 6
    ttft, tpot, itl, e2el = (m.latencies[name] for name in metrics.LATENCIES)
    assert ttft.mean == pytest.approx((500 + 1000 + 250) / 3)
    assert ttft.median == pytest.approx(500)
    assert ttft.percentiles[100] == pytest.approx(1000)
    # (0.9 - 0.5) / 2 and (1.2 - 1.0) / 4; the request with one token has none.
    assert tpot.mean == pytest.approx((200 + 50) / 2)
    assert itl.mean == pytest.approx((100 + 300 + 200) / 3)
    assert itl.std == pytest.approx(np.std([100, 300, 200]))
    assert e2el.mean == pytest.approx((900 + 1200 + 250) / 3)
    # Normalized latency: 0.9 / 3, 1.2 / 5, 0.25 / 1.
    assert m.normalized_latency.mean == pytest.approx((0.3 + 0.24 + 0.25) / 3)
    # The first and the third meet both objectives, the second is late with its first token.
    assert m.goodput == 1.0
    assert m.send_lag.percentiles[100] == pytest.approx(200)
    # In the first second: tokens at 0.5, 0.6, 0.9; in the second: five at 1.2 and 1.4, and one at 1.25.
    assert metrics.tokens_by_second(by_hand()[:3]).tolist() == [3.0, 6.0]
    assert m.max_output_tokens_per_s == 6.0
    assert m.max_concurrent == 3  # from 1.1 to 1.25: the second, the third, and the one that failed


def test_limits_of_objectives():
    one = [outcome(0.0, 0.5, [0.1], 2)]
    for objectives, good in (({"ttft": 500.0}, 1), ({"ttft": 499.9}, 0), ({"e2el": 601}, 1), ({"e2el": 599}, 0)):
        assert compute_metrics(one, 1.0, objectives=objectives).goodput == good
    assert compute_metrics(one, 1.0).goodput is None


def test_against_counting():
    rng = random.Random(0)
    outcomes = []
    for _ in range(60):
        gaps = [rng.choice((0.0, rng.random() / 4)) for _ in range(rng.randrange(8))]
        tokens = len(gaps) + 1 + rng.randrange(3)
        outcomes.append(outcome(rng.random() * 5, rng.random(), gaps, tokens, rng.randrange(1, 99)))
    m = compute_metrics(outcomes, duration=7.0)
    points = [o.start for o in outcomes]
    assert m.max_concurrent == max(sum(o.start <= t < o.start + o.latency for o in outcomes) for t in points)
    counts = [0.0] * 10
    for o in outcomes:
        at = o.start + o.ttft
        for gap in [*o.itls, 0.0]:
            counts[int(at)] += o.output_len / o.num_chunks
            at += gap
    found = metrics.tokens_by_second(outcomes)
    np.testing.assert_allclose(found, counts[: len(found)])
    assert sum(counts[len(found) :]) == 0
    assert m.max_output_tokens_per_s == pytest.approx(max(counts))
    assert m.normalized_latency.mean == pytest.approx(sum(o.latency / o.output_len for o in outcomes) / 60)
    tpots = [(o.latency - o.ttft) / (o.output_len - 1) for o in outcomes if o.output_len > 1]
    assert m.latencies["tpot"].mean == pytest.approx(1000 * sum(tpots) / len(tpots))


def test_nothing_succeeded():
    failed = [Outcome(error="ClientConnectorError: refused", latency=0.1)] * 3
    m = compute_metrics(failed, duration=1.0, objectives={"ttft": 1})
    assert (m.completed, m.failed, m.goodput, m.output_throughput) == (0, 3, 0.0, 0.0)
    assert math.isnan(m.latencies["ttft"].mean)
    record = report.to_json(m, failed)
    assert record["mean_ttft_ms"] is None
    json.dumps(record, allow_nan=False)
    text = report.format_report(m, metrics.LATENCIES, request_rate=math.inf, max_concurrency=0)
    assert "3 failed: ClientConnectorError: refused" in text


def test_the_report_has_the_usual_lines_and_names():
    m = compute_metrics(by_hand(), duration=2.0, percentiles=(99, 99.9))
    text = report.format_report(m, ("ttft", "itl"), request_rate=3.0, max_concurrency=7)
    for line in (
        "Serving Benchmark Result",
        "Successful requests: 3",
        "Maximum request concurrency: 7",
        "Request rate configured (RPS): 3.00",
        "Request throughput (req/s): 1.50",
        "Total input tokens: 160",
        "Peak concurrent requests: 3",
        "Output tokens per chunk: 1.50",
        "P99.9 ITL (ms):",
        "Mean normalized latency (s/token): 0.26333",
        "1 failed: HTTP 429: full",
        "Requests were sent up to 19",
    ):
        assert " ".join(line.split()) in " ".join(text.split()), line
    assert "TPOT" not in text
    record = report.to_json(m, by_hand())
    names = {
        "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
        "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
        "max_concurrent_requests", "mean_ttft_ms", "median_tpot_ms", "std_itl_ms", "p99_e2el_ms", "p99.9_ttft_ms",
        "mean_normalized_latency_s_per_token", "input_lens", "output_lens", "ttfts", "itls", "errors", "generated_texts",
    }  # fmt: skip
    assert names <= set(record)
    assert record["errors"] == ["", "", "", "HTTP 429: full"]
    assert "ttfts" not in report.to_json(m)
