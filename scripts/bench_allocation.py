#!/usr/bin/env python3
"""One workload in one pool of KV memory, allocated in five ways: in one piece at admission (by the longest sequence, by powers
of two, by what each request really needs), in fixed chunks, in pages.

  .venv/bin/python scripts/bench_allocation.py --output=benchmarks/allocation.json

Lengths are log-normal with the means of ShareGPT (161 tokens in, 338 out: Kwon et al., SOSP 2023, figure 11), cut to what
the longest sequence leaves. By default everything is a quarter of the paper's setting: lengths, longest sequence, page. All
requests come at once, or at Poisson times with --rate. The engine, the kernels and
the schedule (iteration by iteration, first come first served) are the same in all runs, so what differs is the memory alone.
First fit is kinder to contiguous allocation than the buddy system that the paper assumes. Nothing is shared between requests.

Beside the JSON a figure is drawn (its name, ending in .png). Times are of a running system that is looked at after every
8 decode steps, the same for all.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import time
from collections.abc import Callable
from typing import Any

import jax
import machine
import matplotlib.pyplot as plt
import numpy as np
from absl import app, flags
from tqdm import tqdm

from pagedjax import Request, SamplingParams
from pagedjax.config import Config
from pagedjax.engine import Engine, build_engine
from pagedjax.options import with_overrides
from pagedjax.runner import sizing
from pagedjax.weights import LoadedModel, load_model

_REQUESTS = flags.DEFINE_integer("requests", 64, "requests", lower_bound=1)
_POOL = flags.DEFINE_integer("pool_tokens", 2048, "token slots in the pool", lower_bound=16)
_PAGE = flags.DEFINE_integer("page_size", 4, "tokens in a page", lower_bound=1)
_CHUNK = flags.DEFINE_integer("chunk_tokens", 64, "tokens in a fixed chunk", lower_bound=1)
_LONGEST = flags.DEFINE_integer("max_len", 512, "longest sequence, in tokens", lower_bound=2)
_SCALE = flags.DEFINE_float(
    "scale", 0.25, "of ShareGPT's lengths; the paper's longest sequence is 2048", lower_bound=0.01
)
_GROWTH = flags.DEFINE_float(
    "growth_share", 0.25, "scheduler.growth_share, for what grows", lower_bound=0.0, upper_bound=1.0
)
_RATE = flags.DEFINE_float("rate", 0.0, "requests a second, Poisson; 0: all at once", lower_bound=0.0)
_MODES = flags.DEFINE_list("modes", ["max_len", "pow2", "request", "chunked", "paged"], "allocations to compare")
_DTYPE = flags.DEFINE_enum("dtype", "auto", ["auto", "bfloat16", "float32"], "weights, activations and pages")
_OUTPUT = flags.DEFINE_string("output", "", "where to write the figures as JSON, and beside it the plot")

ROOT = pathlib.Path(__file__).resolve().parents[1]
SETTING = ("requests", "pool_tokens", "page_size", "chunk_tokens", "max_len", "scale", "growth_share", "rate", "dtype")
MEAN_PROMPT, MEAN_OUTPUT, SPREAD = 161.31, 337.99, 0.8
NAMES = {
    "max_len": "contiguous, longest sequence",
    "pow2": "contiguous, power of two",
    "request": "contiguous, exact (oracle)",
    "chunked": "fixed chunks",
    "paged": "pages",
}
LINES = {"max_len": "#b04a4a", "pow2": "#d9804d", "request": "#c9a227", "chunked": "#6f8f5f", "paged": "#2f6fae"}
PARTS = ("tokens", "reserved", "internal", "free")
PART_COLORS = {
    "tokens stored": "#2f6fae",
    "kept for later tokens of the same request": "#9fc3e3",
    "kept, never used": "#d98a8a",
    "free, though requests wait": "#b9bec5",
    "free": "#eceef0",
}


@dataclasses.dataclass
class Series:
    """What was seen in each turn, between admission and dispatch: it holds until the next entry."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    running: list[int] = dataclasses.field(default_factory=list)
    waiting: list[int] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)  # slots, as all below
    reserved: list[int] = dataclasses.field(default_factory=list)
    internal: list[int] = dataclasses.field(default_factory=list)
    free: list[int] = dataclasses.field(default_factory=list)
    largest_gap: list[int] = dataclasses.field(default_factory=list)

    def look(self, engine: Engine, now: float) -> None:
        stats, size = engine.stats(), engine.runner.page_size
        pool = (stats.pages_total + 1) * size
        self.seconds.append(round(now, 3))
        self.running.append(stats.num_running)
        self.waiting.append(stats.num_waiting)
        for part in ("tokens", "reserved", "internal"):
            getattr(self, part).append(round(stats.pool_shares[part] * pool))
        self.free.append(stats.pages_free * size)
        counts = np.asarray(jax.device_get(engine.runner.state.pages.ref_counts))[1:]
        owned = np.flatnonzero(np.concatenate([[1], counts, [1]]))
        self.largest_gap.append(int(np.diff(owned).max() - 1) * size)


def lengths() -> list[tuple[int, int]]:
    """Tokens of prompt and output of each request."""
    rng = np.random.default_rng(11)

    def draw(mean: float) -> np.ndarray:
        return rng.lognormal(np.log(mean * _SCALE.value) - SPREAD**2 / 2, SPREAD, _REQUESTS.value)

    prompts = np.clip(draw(MEAN_PROMPT), 1, _LONGEST.value // 2).astype(int)
    outputs = np.minimum(np.clip(draw(MEAN_OUTPUT), 1, None).astype(int), _LONGEST.value - prompts)
    return list(zip(prompts.tolist(), outputs.tolist(), strict=True))


def arrivals() -> list[float]:
    """Seconds."""
    if not _RATE.value:
        return [0.0] * _REQUESTS.value
    return np.random.default_rng(12).exponential(1 / _RATE.value, _REQUESTS.value).cumsum().tolist()


def options(mode: str) -> dict[str, Any]:
    """The same pool, allocated by `mode`."""
    buckets = (4, 8, 16, 32, 48)
    same = {
        "model.dtype": _DTYPE.value,
        "model.max_model_len": _LONGEST.value,
        "cache.page_size": _PAGE.value,
        "cache.num_pages": _POOL.value // _PAGE.value + 1,
        "cache.prefix_caching": False,
        "scheduler.max_num_seqs": buckets[-1],
        "scheduler.max_num_batched_tokens": 128,
        "scheduler.growth_share": _GROWTH.value,
        "runner.lane_buckets": buckets,
        "runner.token_buckets": (128,),
        "runner.max_steps": 8,
        "runner.overlap": False,  # what is looked at is then what was decided
    }
    if mode == "paged":
        return same
    if mode == "chunked":
        return same | {"cache.allocation": "chunked", "cache.chunk_tokens": _CHUNK.value}
    return same | {"cache.allocation": "contiguous", "cache.reserve": mode}


def watch(engine: Engine, look: Callable[[], None]) -> None:
    """Have `look` called when memory was given out and before it is used: after a step, who ended is gone already and who
    waits has nothing yet."""
    dispatch = engine._dispatch

    def watched() -> None:
        look()
        dispatch()

    engine._dispatch = watched


def serve(engine: Engine, vocab_size: int) -> tuple[Series, dict[str, float], dict[str, list[int]]]:
    """What was seen, when each request was answered (seconds since it came), and its tokens."""
    rng, series = np.random.default_rng(13), Series()
    schedule = [
        (
            due,
            Request(
                str(i),
                tuple(rng.integers(100, vocab_size - 100, prompt).tolist()),
                SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False),
            ),
        )
        for i, (due, (prompt, output)) in enumerate(zip(arrivals(), lengths(), strict=True))
    ]
    due_at = {request.request_id: due for due, request in schedule}
    tokens: dict[str, list[int]] = {request.request_id: [] for _, request in schedule}
    latency: dict[str, float] = {}
    started = time.perf_counter()
    watch(engine, lambda: series.look(engine, time.perf_counter() - started))
    while schedule or engine.has_unfinished():
        now = time.perf_counter() - started
        while schedule and schedule[0][0] <= now:
            engine.add_request(schedule.pop(0)[1])
        if not engine.has_unfinished():
            time.sleep(min(0.01, schedule[0][0] - now))
            continue
        outputs = engine.step()
        now = time.perf_counter() - started
        for out in outputs:
            tokens[out.request_id] += out.outputs[0].token_ids
            if out.finished:
                latency[out.request_id] = now - due_at[out.request_id]
    series.look(engine, now)
    return series, latency, tokens


def slots_kept(series: Series) -> np.ndarray:
    """Of the slots that requests hold, the share that stores a token; after each look."""
    parts = np.array([series.tokens, series.reserved, series.internal])
    return parts[0] / np.maximum(parts.sum(0), 1)


def summary(series: Series, latency: dict[str, float], tokens: dict[str, list[int]], engine: Engine) -> dict[str, Any]:
    """Figures of one run. `shares` and `mean_running` are over the time in which requests waited, when memory was the limit."""
    seconds = np.array(series.seconds)
    weights = np.diff(seconds, append=seconds[-1]) * (np.array(series.waiting) > 0)
    total = max(weights.sum(), 1e-9)
    slots = sum(np.array(getattr(series, part)) for part in PARTS)
    normalized = [latency[i] / len(tokens[i]) for i in latency]
    return {
        "seconds": round(float(seconds[-1]), 2),
        "output_tokens_per_s": round(sum(map(len, tokens.values())) / float(seconds[-1]), 1),
        "normalized_latency_s": {
            "mean": round(float(np.mean(normalized)), 4),
            "p50": round(float(np.median(normalized)), 4),
            "p90": round(float(np.quantile(normalized, 0.9)), 4),
        },
        "most_running": max(series.running),
        "mean_running": round(float((weights * series.running).sum() / total), 2),
        "shares": {
            part: round(float((weights * np.array(getattr(series, part)) / slots).sum() / total), 4) for part in PARTS
        },
        "tokens_of_kept": round(float((weights * slots_kept(series)).sum() / total), 4),
        "preemptions": engine.counters.preemptions,
    }


def draw(runs: dict[str, dict[str, Any]], path: pathlib.Path) -> None:
    """Requests at once, speed, and what the pool holds over time."""
    figure = plt.figure(figsize=(12.5, 7.8))
    grid = figure.add_gridspec(2, 1, height_ratios=(1.1, 1), hspace=0.5, left=0.06, right=0.985, top=0.88, bottom=0.13)
    upper = grid[0].subgridspec(1, 2, width_ratios=(1.9, 1), wspace=0.5)
    lower = grid[1].subgridspec(1, len(runs), wspace=0.12)
    draw_running(figure.add_subplot(upper[0]), runs)
    draw_speed(figure.add_subplot(upper[1]), runs)
    longest = max(run["series"]["seconds"][-1] for run in runs.values())
    for i, (mode, run) in enumerate(runs.items()):
        axes = figure.add_subplot(lower[i])
        draw_pool(axes, mode, run)
        axes.set(xlim=(0, longest), ylim=(0, 100), xlabel="seconds")
        axes.set_yticks([0, 50, 100], ["0", "50", "100"] if i == 0 else [""] * 3)
        if i == 0:
            axes.set_ylabel("% of the pool")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in PART_COLORS.values()]
    figure.legend(handles, PART_COLORS, loc="lower center", ncols=len(handles), frameon=False, fontsize=9)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    come = f"Poisson, {_RATE.value:g} a second" if _RATE.value else "all at once"
    title = f"{_REQUESTS.value} requests ({come}) in {_POOL.value} token slots, by how memory is allocated"
    figure.suptitle(title, x=0.06, ha="left", fontsize=14, fontweight="bold")
    figure.savefig(path, dpi=110)


def draw_running(axes: Any, runs: dict[str, dict[str, Any]]) -> None:
    """Requests at once over time."""
    for mode, run in runs.items():
        series = run["series"]
        axes.step(series["seconds"], series["running"], where="post", color=LINES[mode], lw=2, label=NAMES[mode])
    axes.set(xlabel="seconds", ylabel="requests running", xlim=(0, None), ylim=(0, None))
    axes.set_title("Requests at once", loc="left", fontweight="bold")
    axes.legend(frameon=False, fontsize=9)


def draw_speed(axes: Any, runs: dict[str, dict[str, Any]]) -> None:
    """Throughput as bars, latency beside them."""
    speed = [run["output_tokens_per_s"] for run in runs.values()]
    axes.barh(range(len(runs)), speed, color=[LINES[mode] for mode in runs], height=0.62)
    for y, run in enumerate(runs.values()):
        latency = run["normalized_latency_s"]["mean"]
        axes.text(speed[y], y, f" {speed[y]:.0f}  ({latency:.2f} s)", va="center", fontsize=9)
    axes.set_yticks(range(len(runs)), [NAMES[mode].replace(", ", ",\n") for mode in runs])
    axes.set(
        xlim=(0, 1.45 * max(speed)),
        xlabel="output tokens per second\n(seconds per token and request, waiting included)",
    )
    axes.invert_yaxis()
    axes.set_title("Throughput (and latency)", loc="left", fontweight="bold")


def draw_pool(axes: Any, mode: str, run: dict[str, Any]) -> None:
    """What the slots of the pool are, over time."""
    series = {name: np.array(values) for name, values in run["series"].items()}
    waits = series["waiting"] > 0
    parts = np.stack([*(series[part] for part in PARTS[:-1]), series["free"] * waits, series["free"] * ~waits])
    axes.stackplot(series["seconds"], 100 * parts / parts.sum(0), colors=PART_COLORS.values(), step="post")
    stored = (
        f"{100 * run['shares']['tokens']:.0f} % tokens while requests wait" if waits.any() else "no request had to wait"
    )
    axes.set_title(f"{NAMES[mode]}\n{stored}", loc="left", fontsize=9)


def run_mode(mode: str, loaded: LoadedModel) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Figures and series of one allocation, and what was generated."""
    engine = build_engine(with_overrides(Config(), options(mode)), loaded=loaded)
    series, latency, tokens = serve(engine, loaded.spec.vocab_size)
    assert engine.stats().compilations_after_warm_up == 0, "a program was compiled while time was taken"
    assert engine.runner.check() == []
    return {**summary(series, latency, tokens, engine), "series": dataclasses.asdict(series)}, tokens


def main(argv: list[str]) -> None:
    del argv
    loaded = load_model("default", sizing.model_dtype(with_overrides(Config(), {"model.dtype": _DTYPE.value})))
    runs, answers = {}, {}
    for mode in tqdm(_MODES.value, desc="Measuring", unit="allocation"):
        runs[mode], answers[mode] = run_mode(mode, loaded)
    first = answers[_MODES.value[0]]
    for mode, run in runs.items():
        run["same_answers"] = sum(answers[mode][i] == ids for i, ids in first.items())
        shares = "  ".join(f"{part} {100 * share:4.1f} %" for part, share in run["shares"].items())
        print(
            f"{NAMES[mode]:30s} {run['seconds']:6.1f} s  {run['output_tokens_per_s']:6.1f} tokens/s  "
            f"{run['normalized_latency_s']['mean']:.3f} s/token  at once {run['mean_running']:5.2f} (most "
            f"{run['most_running']})  {shares}  tokens of what is kept {100 * run['tokens_of_kept']:4.1f} %  "
            f"{run['preemptions']} preemptions  same answers {run['same_answers']}"
        )
    if _OUTPUT.value:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
        info = {"machine": machine.describe(), "commit": commit.stdout.strip(), "command": machine.command()}
        setting = {name: flags.FLAGS[name].value for name in SETTING}
        path = pathlib.Path(_OUTPUT.value)
        path.write_text(json.dumps({**info, "setting": setting, "runs": runs}, separators=(",", ":")))
        draw(runs, path.with_suffix(".png"))


if __name__ == "__main__":
    app.run(main)
