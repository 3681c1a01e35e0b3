"""A run on the terminal and as JSON, under the names that `vllm bench serve` uses."""

from __future__ import annotations

import datetime
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pagedjax.benchmarking.metrics import LATENCIES, Metrics, Statistics
from pagedjax.benchmarking.outcome import Outcome
from pagedjax.errors import ConfigError

_WIDTH = 58
_TITLES = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}
_MANY_TOKENS_A_CHUNK = 1.05
_LAG_WORTH_SAYING_MS = 50.0
_SHOWN_ERRORS = 5


def format_report(metrics: Metrics, shown: Iterable[str], *, request_rate: float, max_concurrency: int) -> str:
    """The block that is printed at the end.

    Args:
      shown: which of LATENCIES.
      request_rate, max_concurrency: as configured (infinite, 0: none).
    """
    m = metrics
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]
    rows: list[tuple[str, float | int]] = [("Successful requests:", m.completed), ("Failed requests:", m.failed)]
    if max_concurrency:
        rows.append(("Maximum request concurrency:", max_concurrency))
    if math.isfinite(request_rate):
        rows.append(("Request rate configured (RPS):", request_rate))
    rows += [
        ("Benchmark duration (s):", m.duration),
        ("Total input tokens:", m.total_input),
        ("Total generated tokens:", m.total_output),
        ("Request throughput (req/s):", m.request_throughput),
    ]
    if m.goodput is not None:
        rows.append(("Request goodput (req/s):", m.goodput))
    rows += [
        ("Output token throughput (tok/s):", m.output_throughput),
        ("Peak output token throughput (tok/s):", m.max_output_tokens_per_s),
        ("Peak concurrent requests:", m.max_concurrent),
        ("Total token throughput (tok/s):", m.total_throughput),
    ]
    if m.cached_tokens:
        rows.append(("Input tokens found in a cache:", m.cached_tokens))
    if m.tokens_per_chunk > _MANY_TOKENS_A_CHUNK:
        rows.append(("Output tokens per chunk:", m.tokens_per_chunk))
    lines += [_row(name, value) for name, value in rows]
    for name in LATENCIES:
        if name in shown:
            lines.append(_TITLES[name][0].center(_WIDTH, "-"))
            lines += _statistics(_TITLES[name][1], "ms", m.latencies[name], 2)
    lines.append("Normalized Latency (E2EL / output tokens)".center(_WIDTH, "-"))
    lines += _statistics("normalized latency", "s/token", m.normalized_latency, 5)
    lines.append("=" * _WIDTH)
    return "\n".join([*lines, *_remarks(m)])


def _row(name: str, value: float | int, digits: int = 2) -> str:
    text = str(value) if isinstance(value, int) else f"{value:.{digits}f}"
    return f"{name:<44}{text:>{_WIDTH - 44}}"


def _statistics(name: str, unit: str, s: Statistics, digits: int) -> list[str]:
    rows = [("Mean", s.mean), ("Median", s.median), *((f"P{p:g}", value) for p, value in s.percentiles.items())]
    return [_row(f"{title} {name} ({unit}):", value, digits) for title, value in rows]


def _remarks(m: Metrics) -> list[str]:
    """What whoever reads the figures should know."""
    out = []
    if m.counted_by.get("tokenizer"):
        out.append(
            f"{m.counted_by['tokenizer']} answers came without usage: their tokens were counted by the tokenizer."
        )
    if m.counted_by.get("chunks"):
        out.append(f"{m.counted_by['chunks']} answers came without usage: a chunk counts as a token (no --tokenizer).")
    worst = max(m.send_lag.percentiles.values(), default=0.0)
    if worst > _LAG_WORTH_SAYING_MS:
        out.append(
            f"Requests were sent up to {worst:.0f} ms after they were due (limit of concurrency, or a busy client)."
        )
    errors = sorted(m.errors.items(), key=lambda item: -item[1])
    out += [f"{count} failed: {text}" for text, count in errors[:_SHOWN_ERRORS]]
    if len(errors) > _SHOWN_ERRORS:
        out.append(f"... and {len(errors) - _SHOWN_ERRORS} other errors (--save_detailed keeps all)")
    return out


def to_json(metrics: Metrics, outcomes: Sequence[Outcome] | None = None) -> dict[str, Any]:
    """The figures as plain JSON values (a NaN becomes null), with every request's where `outcomes` are given."""
    m = metrics
    record: dict[str, Any] = {
        "duration": m.duration,
        "completed": m.completed,
        "failed": m.failed,
        "total_input_tokens": m.total_input,
        "total_output_tokens": m.total_output,
        "request_throughput": m.request_throughput,
        "request_goodput": m.goodput,
        "output_throughput": m.output_throughput,
        "total_token_throughput": m.total_throughput,
        "max_output_tokens_per_s": m.max_output_tokens_per_s,
        "max_concurrent_requests": m.max_concurrent,
        "cached_input_tokens": m.cached_tokens,
        "output_tokens_per_chunk": m.tokens_per_chunk,
        "error_counts": dict(m.errors),
        "output_counted_by": dict(m.counted_by),
    }
    named = [(name, "ms", s) for name, s in m.latencies.items()]
    named += [("normalized_latency", "s_per_token", m.normalized_latency), ("send_lag", "ms", m.send_lag)]
    for name, unit, s in named:
        record |= {f"mean_{name}_{unit}": s.mean, f"median_{name}_{unit}": s.median, f"std_{name}_{unit}": s.std}
        record |= {f"p{p:g}_{name}_{unit}": value for p, value in s.percentiles.items()}
    if outcomes is not None:
        record |= {
            "input_lens": [o.prompt_len for o in outcomes],
            "output_lens": [o.output_len for o in outcomes],
            "ttfts": [o.ttft for o in outcomes],
            "itls": [o.itls for o in outcomes],
            "latencies": [o.latency for o in outcomes],
            "start_times": [o.start for o in outcomes],
            "arrival_times": [o.scheduled for o in outcomes],
            "finish_reasons": [o.finish_reason for o in outcomes],
            "generated_texts": [o.text for o in outcomes],
            "errors": [o.error for o in outcomes],
        }
    return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in record.items()}


def parse_metadata(items: Sequence[str]) -> dict[str, str]:
    """("key=value", ...) as a dictionary. ConfigError for one without `=`."""
    out = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise ConfigError(f"--metadata: must be key=value, got {item!r}")
        out[key] = value
    return out


def result_path(
    folder: str, name: str, *, label: str, rate: float, max_concurrency: int, model: str, now: datetime.datetime
) -> str:
    """Where a result is saved: `name`, or one made of what was run and when."""
    if not name:
        limit = f"-concurrency{max_concurrency}" if max_concurrency else ""
        model = re.sub(r"[^\w.-]+", "_", model.rsplit("/", 1)[-1])
        name = f"{label}-{rate:g}qps{limit}-{model}-{now:%Y%m%d-%H%M%S}.json"
    return os.path.join(folder, name)


def save(path: str, record: Mapping[str, Any], *, append: bool) -> None:
    """Writes a result; with `append`, as one more line of a file of JSON lines. ConfigError where that is not possible."""
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "a" if append else "w", encoding="utf-8") as file:
            json.dump(record, file, indent=None if append else 1, allow_nan=False)
            file.write("\n")
    except OSError as error:
        raise ConfigError(f"{error.filename or path}: {error.strerror}") from None
