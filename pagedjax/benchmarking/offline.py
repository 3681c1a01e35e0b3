"""`bench throughput` and `bench latency`: the engine in this process, without a server."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from pagedjax.benchmarking.datasets import make_requests
from pagedjax.benchmarking.prompts import IdPrompts, Tokenizer
from pagedjax.benchmarking.workload import BenchRequest, DatasetOptions
from pagedjax.config import Config
from pagedjax.errors import ConfigError
from pagedjax.folders import check_file_target
from pagedjax.options import option
from pagedjax.types import RequestOutput, SamplingParams

LATENCY_PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclasses.dataclass(frozen=True)
class OfflineOptions:
    """What both have in common."""

    n: int = option(1, "continuations of each prompt", low=1, high=64)
    temperature: float = option(1.0, "0 is greedy", low=0, high=2)
    detokenize: bool = option(True, "turn tokens into text, which is part of the time")
    output_json: str = option("", "file for the figures")
    progress: bool = option(True, "show progress bars")


@dataclasses.dataclass(frozen=True)
class BatchOptions:
    """The batch of `bench latency`."""

    input_len: int = option(32, "tokens of a prompt", low=1, high=2**20)
    output_len: int = option(128, "tokens to generate", low=1, high=2**20)
    batch_size: int = option(8, "prompts in the batch", low=1, high=4096)
    num_iters_warmup: int = option(10, "runs of the batch that do not count", low=0, high=10**6)
    num_iters: int = option(30, "runs of the batch that count", low=1, high=10**6)
    seed: int = option(0, "of the prompts", low=0, high=2**63 - 1)


THROUGHPUT_OPTIONS = (DatasetOptions, OfflineOptions)
LATENCY_OPTIONS = (BatchOptions, OfflineOptions)


def throughput(config: Config, dataset: DatasetOptions, given: OfflineOptions) -> int:
    """Requests and tokens per second of one call of `LLM.generate` with a whole dataset."""
    check_file_target("--output_json", given.output_json)
    llm = _engine(config, given)
    requests, _ = make_requests(dataset, *_makers(llm, dataset.seed))
    if any(r.arrival is not None for r in requests):
        print("arrival times of the trace are not used: everything is queued at once")
    sampling = [_sampling(given, r.output_len) for r in requests]
    started = time.perf_counter()
    outputs = llm.generate([_prompt(llm, r) for r in requests], sampling, progress=given.progress)
    record = throughput_record(outputs, time.perf_counter() - started)
    record["compilations"] = llm.engine.stats().compilations_after_warm_up
    print(
        f"Throughput: {record['requests_per_second']:.2f} requests/s, {record['tokens_per_second']:.2f} total tokens/s, "
        f"{record['output_tokens_per_second']:.2f} output tokens/s\n"
        f"Total prompt tokens: {record['total_prompt_tokens']} ({record['cached_prompt_tokens']} of them from the prefix "
        f"cache), total output tokens: {record['total_output_tokens']}, in {record['elapsed_time']:.2f} s"
    )
    _write(given, {**record, "dataset": dataclasses.asdict(dataset), "model": llm.engine.model_name})
    return 0


def throughput_record(outputs: Sequence[RequestOutput], seconds: float) -> dict[str, Any]:
    """The figures of finished requests."""
    prompt, output = (sum(x) for x in zip(*((len(o.prompt_ids), o.num_generated_tokens) for o in outputs), strict=True))
    return {
        "elapsed_time": seconds,
        "num_requests": len(outputs),
        "total_num_tokens": prompt + output,
        "total_prompt_tokens": prompt,
        "total_output_tokens": output,
        "cached_prompt_tokens": sum(o.num_cached_tokens for o in outputs),
        "requests_per_second": len(outputs) / seconds,
        "tokens_per_second": (prompt + output) / seconds,
        "output_tokens_per_second": output / seconds,
    }


def latency(config: Config, batch: BatchOptions, given: OfflineOptions) -> int:
    """Seconds that a batch of equal lengths takes, over and over. No run finds another's prompts in the prefix cache."""
    check_file_target("--output_json", given.output_json)
    llm = _engine(config, given)
    ids = _plain_ids(llm)
    options = DatasetOptions(
        num_prompts=batch.batch_size, input_len=batch.input_len, output_len=batch.output_len, seed=batch.seed
    )
    requests, _ = make_requests(options, IdPrompts(ids, batch.seed), None)
    prompts = [list(r.prompt) for r in requests]
    sampling = _sampling(given, batch.output_len)
    taken = []
    total = batch.num_iters_warmup + batch.num_iters
    for i in tqdm(range(total), desc="Batches", unit="batch", disable=not given.progress):
        started = time.perf_counter()
        llm.generate(prompts, sampling, cache_salt=f"iteration-{i}", progress=False)
        taken.append(time.perf_counter() - started)
    record = latency_record(taken[batch.num_iters_warmup :])
    print(f"Avg latency: {record['avg_latency']:.4f} seconds")
    for p, value in record["percentiles"].items():
        print(f"{p}% percentile latency: {value:.4f} seconds")
    _write(given, {**record, "batch": dataclasses.asdict(batch), "model": llm.engine.model_name})
    return 0


def latency_record(seconds: Sequence[float]) -> dict[str, Any]:
    """The figures of the iterations that count."""
    return {
        "avg_latency": float(np.mean(seconds)),
        "latencies": list(seconds),
        "percentiles": {str(p): float(np.percentile(seconds, p)) for p in LATENCY_PERCENTILES},
    }


def _engine(config: Config, given: OfflineOptions) -> Any:
    from pagedjax.engine import LLM  # a moment to import: the checks ahead answer at once

    return LLM(config=config, progress=given.progress)


def _makers(llm: Any, seed: int) -> tuple[IdPrompts, Tokenizer | None]:
    tokenizer = None if llm.tokenizer is None else Tokenizer(llm.tokenizer)
    return IdPrompts(_plain_ids(llm, tokenizer), seed, tokenizer), tokenizer


def _plain_ids(llm: Any, tokenizer: Tokenizer | None = None) -> np.ndarray:
    """Ids of the model that are not special; all of them where it has no tokenizer."""
    if tokenizer is None and llm.tokenizer is not None:
        tokenizer = Tokenizer(llm.tokenizer)
    ids = np.arange(llm.engine.vocab_size) if tokenizer is None else tokenizer.plain_ids
    return ids[ids < llm.engine.vocab_size]


def _prompt(llm: Any, request: BenchRequest) -> Any:
    if request.messages is not None:
        return llm.engine.loaded.encode_chat(list(request.messages))
    return list(request.prompt) if isinstance(request.prompt, tuple) else request.prompt


def _sampling(given: OfflineOptions, output_len: int) -> SamplingParams:
    return SamplingParams(
        n=given.n,
        temperature=given.temperature,
        max_tokens=output_len,
        ignore_eos=True,
        detokenize=given.detokenize,
    )


def _write(given: OfflineOptions, record: dict[str, Any]) -> None:
    if not given.output_json:
        return
    try:
        with open(given.output_json, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)
            file.write("\n")
    except OSError as error:
        raise ConfigError(f"--output_json={given.output_json}: {error.strerror}") from None
