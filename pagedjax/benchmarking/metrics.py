"""What a run's outcomes amount to. Definitions are those of `vllm bench serve`, unless a docstring says otherwise."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from pagedjax.benchmarking.outcome import Outcome
from pagedjax.benchmarking.prompts import Tokenizer

LATENCIES = ("ttft", "tpot", "itl", "e2el")
"""Time to first token; time per output token (without the first); inter-token latency, the gap between chunks with output;
end-to-end latency. In milliseconds."""
SLO_METRICS = ("ttft", "tpot", "e2el")


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Of one quantity over requests (of inter-token latency: over chunks). NaN where there is nothing."""

    mean: float
    median: float
    std: float
    percentiles: Mapping[float, float]


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Of the requests that succeeded, but `failed` and `errors`.

    Attributes:
      duration: seconds from the start to the end of the last request.
      goodput: requests per second that met every objective; None where none was given.
      max_output_tokens_per_s: most output tokens in a second of the run, counted from its start; a request's tokens are
        spread evenly over its chunks.
      max_concurrent: most requests in flight at once, exactly.
      latencies: by LATENCIES, in milliseconds.
      normalized_latency: seconds per output token: mean over requests of end-to-end latency / output length (Kwon et al.,
        SOSP 2023).
      send_lag: milliseconds from when a request was due to when it was sent.
      errors: text -> how many requests failed with it.
    """

    completed: int
    failed: int
    duration: float
    total_input: int
    total_output: int
    request_throughput: float
    goodput: float | None
    output_throughput: float
    total_throughput: float
    max_output_tokens_per_s: float
    max_concurrent: int
    cached_tokens: int
    tokens_per_chunk: float
    latencies: Mapping[str, Statistics]
    normalized_latency: Statistics
    send_lag: Statistics
    errors: Mapping[str, int]
    counted_by: Mapping[str, int]


def count_output(outcomes: Sequence[Outcome], tokenizer: Tokenizer | None) -> None:
    """Counts the output of requests whose server did not: by the tokenizer, else by chunks. After the run, not in it."""
    for outcome in outcomes:
        if not outcome.ok or outcome.counted_by:
            continue
        if tokenizer is not None:
            outcome.output_len, outcome.counted_by = tokenizer.count(outcome.text, special=False), "tokenizer"
        else:
            outcome.output_len, outcome.counted_by = outcome.num_chunks, "chunks"


def compute_metrics(
    outcomes: Sequence[Outcome],
    duration: float,
    percentiles: Sequence[float] = (99.0,),
    objectives: Mapping[str, float] | None = None,
) -> Metrics:
    """Args:
    outcomes: with counted output.
    duration: seconds.
    percentiles: in [0, 100], interpolated linearly.
    objectives: SLO_METRICS -> milliseconds, each to be met by a request that counts for goodput.
    """
    good = [o for o in outcomes if o.ok]
    total_input, total_output = sum(o.prompt_len for o in good), sum(o.output_len for o in good)
    chunks = sum(o.num_chunks for o in good)
    milliseconds = {
        "ttft": [o.ttft * 1000 for o in good],
        "tpot": [o.tpot * 1000 for o in good if o.output_len > 1],
        "itl": [gap * 1000 for o in good for gap in o.itls],
        "e2el": [o.latency * 1000 for o in good],
    }
    return Metrics(
        completed=len(good),
        failed=len(outcomes) - len(good),
        duration=duration,
        total_input=total_input,
        total_output=total_output,
        request_throughput=len(good) / duration,
        goodput=sum(_meets(o, objectives) for o in good) / duration if objectives else None,
        output_throughput=total_output / duration,
        total_throughput=(total_input + total_output) / duration,
        max_output_tokens_per_s=float(max(tokens_by_second(good), default=0)),
        max_concurrent=max_concurrent(outcomes),
        cached_tokens=sum(o.cached_tokens for o in good),
        tokens_per_chunk=total_output / chunks if chunks else 0.0,
        latencies={name: _statistics(values, percentiles) for name, values in milliseconds.items()},
        normalized_latency=_statistics([o.normalized_latency for o in good if o.output_len], percentiles),
        send_lag=_statistics([(o.start - o.scheduled) * 1000 for o in outcomes], percentiles),
        errors=collections.Counter(o.error for o in outcomes if not o.ok),
        counted_by=collections.Counter(o.counted_by for o in good),
    )


def _statistics(values: Sequence[float], percentiles: Sequence[float]) -> Statistics:
    if not values:
        return Statistics(np.nan, np.nan, np.nan, dict.fromkeys(percentiles, np.nan))
    x = np.asarray(values)
    return Statistics(
        float(x.mean()), float(np.median(x)), float(x.std()), {p: float(np.percentile(x, p)) for p in percentiles}
    )


def _meets(outcome: Outcome, objectives: Mapping[str, float]) -> bool:
    taken = {"ttft": outcome.ttft, "tpot": outcome.tpot, "e2el": outcome.latency}
    return all(taken[name] * 1000 <= limit for name, limit in objectives.items())


def chunk_times(outcome: Outcome) -> np.ndarray:
    """Seconds from the start of the run to each chunk with output."""
    if not outcome.num_chunks:
        return np.zeros(0)
    return outcome.start + np.cumsum([outcome.ttft, *outcome.itls])


def tokens_by_second(outcomes: Sequence[Outcome]) -> np.ndarray:
    """Output tokens in each second of the run; a request's tokens are spread evenly over its chunks."""
    times = [chunk_times(o) for o in outcomes]
    if not sum(map(len, times)):
        return np.zeros(0)
    weights = np.concatenate(
        [np.full(len(t), o.output_len / max(len(t), 1)) for o, t in zip(outcomes, times, strict=True)]
    )
    return np.bincount(np.concatenate(times).astype(np.int64), weights)


def concurrency(outcomes: Sequence[Outcome]) -> tuple[np.ndarray, np.ndarray]:
    """(seconds, requests in flight from then on); one that begins as another ends does not overlap it."""
    steps = sorted([(o.start, 1) for o in outcomes] + [(o.start + o.latency, -1) for o in outcomes])
    return np.array([t for t, _ in steps]), np.cumsum([d for _, d in steps])


def max_concurrent(outcomes: Sequence[Outcome]) -> int:
    """Most requests in flight at once."""
    return int(max(concurrency(outcomes)[1], default=0))
