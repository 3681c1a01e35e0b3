"""`bench serve`: options, and the run from the first look at the server to the saved result."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import json
import math
import os
import sys
from typing import Any

import numpy as np

from pagedjax.benchmarking import arrivals, report
from pagedjax.benchmarking.client import Client, Target
from pagedjax.benchmarking.datasets import make_requests
from pagedjax.benchmarking.load import run_load
from pagedjax.benchmarking.metrics import LATENCIES, SLO_METRICS, Metrics, compute_metrics, count_output
from pagedjax.benchmarking.outcome import Outcome
from pagedjax.benchmarking.prompts import IdPrompts, PromptMaker, TextPrompts, Tokenizer
from pagedjax.benchmarking.timeline import plot_timeline, require_matplotlib
from pagedjax.benchmarking.workload import BenchRequest, DatasetOptions
from pagedjax.errors import ConfigError, ModelLoadError
from pagedjax.folders import check_file_target, check_folder_target
from pagedjax.options import option

KEY_VARIABLE = "OPENAI_API_KEY"


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """Which server, and how it is spoken to."""

    backend: str = option(
        "openai", "openai: /v1/completions. openai-chat: /v1/chat/completions", choices=("openai", "openai-chat")
    )
    base_url: str = option("", "the server, such as http://127.0.0.1:8000; empty: http://HOST:PORT")
    host: str = option("127.0.0.1", "of the server")
    port: int = option(8000, "of the server", low=1, high=65535)
    endpoint: str = option("", "path; empty: the backend's")
    model: str = option("", "name in the requests; empty: the first that the server names")
    served_model_name: str = option("", "name in the requests, where --model is the name of the tokenizer")
    tokenizer: str = option(
        "", "default, gemma3-270m, a folder, a .gguf file or owner/name; empty: the model's. none: no tokenizer"
    )
    prompt_format: str = option(
        "auto",
        "random prompts as token ids or as text; auto: ids where the server takes them",
        choices=("auto", "ids", "text"),
    )
    vocab_size: int = option(
        0, "where there is no tokenizer: random prompts are drawn from ids below this", low=0, high=2**24
    )
    header: tuple[str, ...] = option((), "NAME=VALUE, sent with every request; may be given again", repeated=True)
    api_key_file: str = option("", f"file with the API key; else the environment variable {KEY_VARIABLE} has it")
    extra_body: str = option("{}", "JSON object with further fields of every request's body")
    include_usage: bool = option(True, "ask for the usage at the end of a stream")
    request_id_prefix: str = option("", "X-Request-Id of a request is this and its number; empty: none is sent")
    request_timeout_sec: float = option(21600.0, "most seconds that a request may take", low=0.001, high=1e6)
    ready_check_timeout_sec: float = option(600.0, "how long to wait for the server; 0: one try", low=0, high=1e6)


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen. What stays at its default is not sent, but for the temperature."""

    temperature: float = option(0.0, "0 is greedy", low=0, high=2)
    top_p: float = option(1.0, "only the likeliest tokens that have this probability together", low=0, high=1)
    top_k: int = option(0, "only so many likeliest tokens; 0: all", low=0, high=2**31 - 1)
    min_p: float = option(0.0, "only tokens at least so likely, as a share of the likeliest", low=0, high=1)
    presence_penalty: float = option(0.0, "on tokens generated already", low=-2, high=2)
    frequency_penalty: float = option(0.0, "on tokens generated already, for each time", low=-2, high=2)
    repetition_penalty: float = option(1.0, "factor on tokens of the prompt and the output", low=0.01, high=10)
    ignore_eos: bool = option(False, "generate exactly the output length (a field that not every server knows)")
    logprobs: int = option(-1, "log-probabilities to ask for; -1: none", low=-1, high=20)
    chat_template_kwargs: str = option("{}", "JSON object for the chat template")

    def fields(self, *, chat: bool) -> dict[str, Any]:
        """Fields of a request's body."""
        neutral = SamplingOptions()
        names = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos")
        out = {name: getattr(self, name) for name in names if getattr(self, name) != getattr(neutral, name)}
        if self.logprobs >= 0:
            out |= {"logprobs": True, "top_logprobs": self.logprobs} if chat else {"logprobs": self.logprobs}
        if template := _object("--chat_template_kwargs", self.chat_template_kwargs):
            out["chat_template_kwargs"] = template
        return {"temperature": self.temperature, **out}


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """When requests are sent."""

    request_rate: float = option(
        math.inf, "requests per second; inf: all at once. A trace keeps its own times", low=1e-6, high=math.inf
    )
    burstiness: float = option(
        1.0, "shape of the gamma-distributed gaps: 1 is a Poisson process, less is burstier", low=1e-3, high=1e6
    )
    ramp_up_strategy: str = option("", "raise the rate from start to end over the run", choices=("", *arrivals.RAMPS))
    ramp_up_start_rps: float = option(0.0, "rate at the start of a ramp", low=0, high=1e6)
    ramp_up_end_rps: float = option(0.0, "rate at the end of a ramp", low=0, high=1e6)
    max_concurrency: int = option(0, "most requests in flight; later ones wait; 0: no limit", low=0, high=10**6)
    num_warmups: int = option(0, "requests before the run, which do not count", low=0, high=10**6)
    progress: bool = option(True, "show a progress bar")

    def times(self, requests: list[BenchRequest], seed: int) -> np.ndarray:
        """f64 offsets in seconds; a trace brings its own."""
        num = len(requests)
        if requests[0].arrival is not None:
            return np.array([r.arrival for r in requests])
        if not self.ramp_up_strategy:
            return arrivals.arrival_times(num, self.request_rate, self.burstiness, seed)
        if not (self.ramp_up_start_rps and self.ramp_up_end_rps):
            raise ConfigError("--ramp_up_strategy: needs --ramp_up_start_rps and --ramp_up_end_rps above 0")
        if math.isfinite(self.request_rate):
            raise ConfigError("--request_rate: not together with --ramp_up_strategy, which has rates of its own")
        rates = arrivals.ramp_rates(num, self.ramp_up_start_rps, self.ramp_up_end_rps, self.ramp_up_strategy)
        return arrivals.ramped_times(rates, self.burstiness, seed)


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """What is reported and kept."""

    percentile_metrics: tuple[str, ...] = option(LATENCIES, "latencies to print", choices=LATENCIES)
    metric_percentiles: tuple[float, ...] = option((99.0,), "percentiles of each", low=0, high=100)
    goodput: tuple[str, ...] = option((), "objectives in milliseconds: ttft:200,tpot:50,e2el:5000 (any of them)")
    save_result: bool = option(False, "save the figures as JSON")
    save_detailed: bool = option(False, "with every request's times, text and error")
    append_result: bool = option(False, "add a line to --result_filename instead of replacing it")
    result_dir: str = option(".", "folder of saved results")
    result_filename: str = option("", "file of the saved result; empty: named after what was run and when")
    label: str = option("", "begins that name; empty: the backend")
    metadata: tuple[str, ...] = option((), "KEY=VALUE, kept in the result; may be given again", repeated=True)
    plot_timeline: str = option("", "PNG file to write: every request over time")
    timeline_itl_thresholds: tuple[float, ...] = option(
        (25.0, 50.0), "milliseconds up to which gaps are green, and yellow", low=0, high=1e6
    )


OPTIONS = (ServerOptions, DatasetOptions, LoadOptions, SamplingOptions, ReportOptions)


def serve(
    server: ServerOptions, dataset: DatasetOptions, load: LoadOptions, sampling: SamplingOptions, shown: ReportOptions
) -> int:
    """Runs the benchmark. Exit status 1 where no request succeeded.

    Raises:
      ConfigError, ModelLoadError: before anything is sent, with what to do about it.
    """
    objectives = parse_objectives(shown.goodput)
    metadata = report.parse_metadata(shown.metadata)
    limits = shown.timeline_itl_thresholds
    if len(limits) != 2 or limits[0] > limits[1]:
        raise ConfigError(f"--timeline_itl_thresholds: must be two numbers, the smaller first, got {limits}")
    saves = shown.save_result or shown.save_detailed or shown.append_result
    if shown.plot_timeline:
        require_matplotlib()
    # A long run must not be lost for a path.
    check_file_target("--plot_timeline", shown.plot_timeline)
    if saves:
        check_folder_target("--result_dir", shown.result_dir)
    run = asyncio.run(_Run(server, dataset, load, sampling).measure())
    count_output(run.outcomes, run.tokenizer)
    metrics = compute_metrics(run.outcomes, run.duration, shown.metric_percentiles, objectives)
    # Kept before it is shown: a terminal that has gone must not cost the run.
    if saves:
        _save(run, metrics, (server, dataset, load, sampling, shown), metadata)
    if shown.plot_timeline:
        plot_timeline(run.outcomes, (limits[0], limits[1]), shown.plot_timeline)
        _say(f"timeline: {shown.plot_timeline}")
    rate, limit = load.request_rate, load.max_concurrency
    print(report.format_report(metrics, shown.percentile_metrics, request_rate=rate, max_concurrency=limit))
    return 0 if metrics.completed else 1


def parse_objectives(items: tuple[str, ...]) -> dict[str, float]:
    """("ttft:200", ...) as milliseconds by metric. ConfigError says what is allowed."""
    out = {}
    for item in items:
        name, _, text = item.partition(":")
        try:
            limit = float(text)
        except ValueError:
            limit = math.nan
        if name not in SLO_METRICS or not 0 <= limit < math.inf:
            raise ConfigError(f"--goodput: must be {', '.join(SLO_METRICS)}, each with :MILLISECONDS; got {item!r}")
        out[name] = limit
    return out


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a run left."""

    outcomes: list[Outcome]
    duration: float
    tokenizer: Tokenizer | None
    tokenizer_name: str
    model: str
    prompt_format: str


class _Run:
    """One run against one server."""

    def __init__(self, server: ServerOptions, dataset: DatasetOptions, load: LoadOptions, sampling: SamplingOptions):
        self.server, self.dataset, self.load = server, dataset, load
        chat = server.backend == "openai-chat"
        fields = sampling.fields(chat=chat)
        if server.include_usage:
            fields["stream_options"] = {"include_usage": True}
        self.target = Target(
            url=(server.base_url or f"http://{server.host}:{server.port}").rstrip("/").removesuffix("/v1"),
            path="/" + (server.endpoint or ("v1/chat/completions" if chat else "v1/completions")).lstrip("/"),
            chat=chat,
            model=server.served_model_name or server.model,
            fields={**fields, **_object("--extra_body", server.extra_body)},
            headers=_headers(server),
        )
        if not self.target.url.startswith(("http://", "https://")):
            raise ConfigError(f"--base_url: must begin with http:// or https://, got {server.base_url!r}")

    async def measure(self) -> Measured:
        async with Client(self.target, self.server.request_timeout_sec) as client:
            wait = self.server.ready_check_timeout_sec
            await client.wait_until_ready(wait)
            if not self.target.model:
                self.target = dataclasses.replace(self.target, model=await client.first_model())
                client.target = self.target
            name, tokenizer = find_tokenizer(self.server, self.target.model)
            maker, prompt_format = await self._maker(client, tokenizer, wait)
            requests, warm_ups = make_requests(self.dataset, maker, tokenizer, self.load.num_warmups)
            self._check(requests)
            times = self.load.times(requests, self.dataset.seed)
            options: dict[str, Any] = {"max_concurrency": self.load.max_concurrency, "progress": self.load.progress}
            if warm_ups:
                _say(f"{len(warm_ups)} warm-up requests")
                warmed, _ = await run_load(client, warm_ups, [0.0] * len(warm_ups), **options)
                if failed := [o.error for o in warmed if not o.ok]:
                    raise ConfigError(f"--num_warmups: {len(failed)} of {len(warmed)} failed: {failed[0]}")
            _say(f"{len(requests)} requests to {self.target.url}{self.target.path}, model {self.target.model}")
            outcomes, duration = await run_load(
                client,
                requests,
                times.tolist(),
                request_id_prefix=self.server.request_id_prefix,
                keep_finished=True,
                **options,
            )
        return Measured(outcomes, duration, tokenizer, name, self.target.model, prompt_format)

    async def _maker(self, client: Client, tokenizer: Tokenizer | None, wait: float) -> tuple[PromptMaker, str]:
        """Who makes prompts, after the server has shown that it takes that kind."""
        ids, error = await self._format(client, wait, tokenizer is None and self.server.vocab_size == 0)
        if error:
            raise ConfigError(f"a first request to {self.target.url}{self.target.path} failed: {error}")
        seed = self.dataset.seed
        if ids and (tokenizer is not None or self.server.vocab_size):
            known = np.arange(self.server.vocab_size) if tokenizer is None else tokenizer.plain_ids
            return IdPrompts(known, seed, tokenizer), "ids"
        if tokenizer is None:
            raise ConfigError(
                "--tokenizer: needed to make prompts of known lengths; name a model, a folder or a .gguf file (with "
                "--vocab_size random token ids do without, where the server takes ids)"
            )
        return TextPrompts(tokenizer, seed, special=not self.target.chat), "text"

    async def _format(self, client: Client, wait: float, only_text: bool) -> tuple[bool, str]:
        """(prompts may be token ids, why even text was refused)."""
        wanted = "text" if self.target.chat or only_text else self.server.prompt_format
        found = Outcome()
        for ids in {"auto": (True, False), "ids": (True,), "text": (False,)}[wanted]:
            found = await client.probe(wait, ids=ids)
            if found.ok:
                return ids, ""
        return False, found.error

    def _check(self, requests: list[BenchRequest]) -> None:
        if not self.target.chat and any(r.messages for r in requests):
            raise ConfigError("--backend: conversations (messages) need openai-chat")
        if self.target.chat and any(isinstance(r.prompt, tuple) and not r.messages for r in requests):
            raise ConfigError("--backend: prompts of token ids need openai (completions)")


def find_tokenizer(server: ServerOptions, model: str) -> tuple[str, Tokenizer | None]:
    """(what it was loaded from, tokenizer): the one named, else the model's. None: none was wanted.

    Raises:
      ConfigError: the model's name leads to no tokenizer.
    """
    from pagedjax.weights import read_tokenizer
    from pagedjax.weights.packaged_models import PACKAGED_MODELS

    if server.tokenizer == "none":
        return "none", None
    by_name = {packaged.name: key for key, packaged in PACKAGED_MODELS.items()}
    path = server.tokenizer or by_name.get(server.model or model, server.model or model)
    try:
        found = read_tokenizer(path)
    except ModelLoadError as error:
        raise ConfigError(f"--tokenizer: {path!r} has none that can be loaded; name one. {error}") from None
    if found is None:
        raise ConfigError(f"--tokenizer: {path!r} has no tokenizer; name one")
    return path, Tokenizer(found)


def _headers(server: ServerOptions) -> dict[str, str]:
    out = {}
    key = os.environ.get(KEY_VARIABLE, "")
    if server.api_key_file:
        try:
            with open(server.api_key_file, encoding="utf-8") as file:
                key = file.readline().strip()
        except OSError as error:
            raise ConfigError(f"--api_key_file={server.api_key_file}: {error.strerror}") from None
    if key:
        out["Authorization"] = f"Bearer {key}"
    for item in server.header:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise ConfigError(f"--header: must be NAME=VALUE, got {item.partition('=')[0]!r}")
        out[name] = value
    return out


def _object(flag: str, text: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        if isinstance(found := json.loads(text), dict):
            return found
    raise ConfigError(f"{flag}: must be a JSON object, got {text!r}")


def _save(run: Measured, metrics: Metrics, given: tuple[Any, ...], metadata: dict[str, str]) -> None:
    server, dataset, load, sampling, shown = given
    now = datetime.datetime.now().astimezone()
    label, rate = shown.label or server.backend, load.request_rate
    record = {
        "date": f"{now:%Y%m%d-%H%M%S}",
        "endpoint_type": server.backend,
        "backend": server.backend,
        "label": label,
        "model_id": run.model,
        "tokenizer_id": run.tokenizer_name,
        "num_prompts": len(run.outcomes),
        "request_rate": rate if math.isfinite(rate) else "inf",
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency or None,
        "ramp_up_strategy": load.ramp_up_strategy or None,
        "ramp_up_start_rps": load.ramp_up_start_rps or None,
        "ramp_up_end_rps": load.ramp_up_end_rps or None,
        "prompt_format": run.prompt_format,
        "dataset": dataclasses.asdict(dataset),
        "sampling": dataclasses.asdict(sampling),
        "goodput_objectives_ms": parse_objectives(shown.goodput) or None,
        **metadata,
        **report.to_json(metrics, run.outcomes if shown.save_detailed else None),
    }
    path = report.result_path(
        shown.result_dir,
        shown.result_filename,
        label=label,
        rate=rate,
        max_concurrency=load.max_concurrency,
        model=run.model,
        now=now,
    )
    report.save(path, record, append=shown.append_result)
    _say(f"result: {path}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
