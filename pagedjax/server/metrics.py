"""Prometheus metrics under `pagedjax:`; where the meaning is that of a `vllm:` metric, so is the rest of the name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from starlette.types import Scope

from pagedjax.types import Request, RequestOutput

PREFIX = "pagedjax:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PAGE_STATES = ("free", "active", "shared", "cached", "pending")
_PATHS = frozenset(
    (
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/health",
        "/metrics",
        "/version",
    )
)
_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))

_GAUGES = (  # name, attribute of EngineStats, what it says
    ("num_requests_running", "num_running", "sequences that hold a row"),
    ("num_requests_waiting", "num_waiting", "requests in the queue"),
    ("kv_cache_usage_perc", "kv_usage", "pages that running sequences hold, as a share of the usable ones (1 = all)"),
    ("kv_pages_usable", "pages_total", "pages that can be handed out"),
    ("kv_pages_used", "pages_used", "pages that running sequences hold"),
    ("kv_pages_cached", "pages_cached", "pages without an owner, kept for a prefix hit; free for the taking"),
    ("host_pages", "host_pages_total", "pages of the host pool"),
    ("host_pages_used", "host_pages_used", "pages of the host pool that hold something"),
    (
        "kv_sharing_ratio",
        "sharing_ratio",
        "share of the page-table entries saved by sharing: (mapped - distinct) / mapped",
    ),
)
_SHARES = (  # name, attribute of EngineStats: a dict by part, what it says
    (
        "kv_owned_share",
        "owned_shares",
        "token slots of the pages in tables by what they hold; the shares add up to 1, or 0",
    ),
    ("kv_pool_share", "pool_shares", "token slots of all pages by what they hold; the shares add up to 1"),
)
_COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "prompt tokens of admitted requests"),
    ("prompt_tokens_cached", "cached_prompt_tokens", "prompt tokens that were found in the prefix cache"),
    ("generation_tokens", "generation_tokens", "tokens generated"),
    ("prefix_cache_queries", "prefix_queries", "tokens looked up in the prefix cache, resumed sequences included"),
    ("prefix_cache_hits", "prefix_hits", "tokens found by those look-ups"),
    ("num_preemptions", "preemptions", "sequences whose pages were taken back before they ended"),
    ("swapped_out_pages", "swapped_out_pages", "pages of preempted sequences copied to the host"),
    ("swapped_in_pages", "swapped_in_pages", "pages of preempted sequences brought back"),
    ("spilled_pages", "spilled_pages", "cached pages copied to the host before they were recycled"),
    ("revived_pages", "revived_pages", "spilled pages that a later request found on the host"),
    ("forks", "forks", "sequences that began as copies of running ones, sharing their pages"),
    ("page_copies", "page_copies", "shared pages copied because a holder was about to write into them"),
    ("compilations_after_warm_up", "compilations_after_warm_up", "programs compiled while serving; should stay 0"),
    ("engine_steps", "steps", "turns of the scheduling loop"),
    ("engine_dispatches", "dispatches", "programs sent to the device"),
)


class _EngineCollector:
    """Reads the engine's statistics at the moment of the scrape, so that no gauge can drift from the truth."""

    def __init__(self, engine: Any):
        self.engine = engine
        self.labels = {"model_name": engine.model_name}

    def collect(self) -> Iterator[Any]:
        stats = self.engine.stats()
        names, values = list(self.labels), list(self.labels.values())

        def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
            family = GaugeMetricFamily(PREFIX + name, text, labels=names)
            family.add_metric(values, value)
            return family

        used = stats.pages_active + stats.pages_shared + stats.pages_pending
        for name, attribute, text in _GAUGES:
            yield gauge(name, text, used if attribute == "pages_used" else getattr(stats, attribute))
        by_state = GaugeMetricFamily(PREFIX + "kv_pages", "pages by state", labels=[*names, "state"])
        for state in _PAGE_STATES:
            by_state.add_metric([*values, state], getattr(stats, f"pages_{state}"))
        yield by_state
        for name, attribute, text in _SHARES:
            by_part = GaugeMetricFamily(PREFIX + name, text, labels=[*names, "part"])
            for part, share in getattr(stats, attribute).items():
                by_part.add_metric([*values, part], share)
            yield by_part
        for name, attribute, text in _COUNTERS:
            counter = CounterMetricFamily(PREFIX + name, text, labels=names)
            counter.add_metric(values, getattr(stats, attribute))
            yield counter
        ended = CounterMetricFamily(PREFIX + "request_success", "ended requests", labels=[*names, "finished_reason"])
        for reason, count in stats.requests_finished.items():
            ended.add_metric([*values, str(reason)], count)
        yield ended
        cache = self.engine.config.cache
        info = InfoMetricFamily(PREFIX + "cache_config", "the page pool")
        info.add_metric(
            [], {"page_size": str(cache.page_size), "dtype": cache.dtype, "num_pages": str(stats.pages_total + 1)}
        )
        yield info


class Metrics:
    """Everything /metrics shows, in a registry of its own."""

    def __init__(self, engine: Any):
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine))
        self._model = engine.model_name
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "arrival to first token", _SECONDS)
        self.inter_token_latency = self._histogram("inter_token_latency_seconds", "between two outputs", _SECONDS)
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds", "(end - first token) / (tokens - 1) of a request", _SECONDS
        )
        self.e2e_latency = self._histogram("e2e_request_latency_seconds", "arrival to end", _SECONDS)
        self.prompt_tokens = self._histogram("request_prompt_tokens", "prompt tokens of a request", _TOKENS)
        self.generation_tokens = self._histogram("request_generation_tokens", "tokens generated for a request", _TOKENS)
        self.params_n = self._histogram("request_params_n", "n of a request", (1, 2, 5, 10, 20, 64))
        self.params_max_tokens = self._histogram("request_params_max_tokens", "max_tokens of a request", _TOKENS)
        self._http = Counter(
            PREFIX + "http_requests", "answers by path and status", ["path", "status"], registry=self.registry
        )
        self.ignored_fields = Counter(
            PREFIX + "ignored_request_fields", "fields of requests that nobody here knows", registry=self.registry
        )

    def _histogram(self, name: str, text: str, buckets: tuple) -> Histogram:
        histogram = Histogram(PREFIX + name, text, ["model_name"], buckets=buckets, registry=self.registry)
        return histogram.labels(self._model)

    def count_http(self, scope: Scope, status: int) -> None:
        path = scope["path"] if scope["path"] in _PATHS else "other"  # a client must not invent label values
        self._http.labels(path, str(status or "gone")).inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)


class Stopwatch:
    """Times one request, from its construction to `finish`."""

    def __init__(self, metrics: Metrics, request: Request):
        self.metrics = metrics
        self.started = time.monotonic()
        self.first = self.last = 0.0
        self.generated = 0
        self._request = request

    def observe(self, output: RequestOutput) -> None:
        """Takes note of one delta."""
        now = time.monotonic()
        if any(o.token_ids for o in output.outputs):
            if self.first:
                self.metrics.inter_token_latency.observe(now - self.last)
            else:
                self.first = now
                self.metrics.time_to_first_token.observe(now - self.started)
            self.last = now
        self.generated = max(self.generated, output.num_generated_tokens)
        if output.finished:
            self.metrics.e2e_latency.observe(now - self.started)
            self.metrics.generation_tokens.observe(self.generated)
            self._observe_request()
            if self.generated > 1 and self.first:
                self.metrics.time_per_output_token.observe((now - self.first) / (self.generated - 1))

    def _observe_request(self) -> None:
        """At the end, so that a refused request is in none of the histograms."""
        sampling = self._request.sampling
        self.metrics.prompt_tokens.observe(len(self._request.prompt_ids))
        self.metrics.params_n.observe(sampling.n)
        if sampling.max_tokens is not None:
            self.metrics.params_max_tokens.observe(sampling.max_tokens)
