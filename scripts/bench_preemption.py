#!/usr/bin/env python3
"""What it takes to bring a preempted sequence back, by page size: compute it again, or swap its pages out and in.

  .venv/bin/python scripts/bench_preemption.py --output=benchmarks/preemption.json

The real engine with the default model (Kwon et al., SOSP 2023, Fig. 19a, is the same for OPT-13B on an A100). One sequence of
`tokens` tokens decodes; it is preempted and comes back, again and again. Recompute: from the preemption to the next token.
Swap out: the preemption itself, which copies its pages to the host. Swap in: its admission, which brings them back; the one
decode step after that is left out. Nothing is cached otherwise. The best of `repeat` counts; the ways take turns, so that
a change of the machine hits both. The tokens are compared with those of a run in which nothing is preempted.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import time

import jax
import machine
import numpy as np
from absl import app, flags
from tqdm import tqdm

from pagedjax import Request, SamplingParams
from pagedjax.config import Config
from pagedjax.engine import Engine, build_engine
from pagedjax.options import with_overrides
from pagedjax.runner import sizing
from pagedjax.weights import LoadedModel, load_model

_TOKENS = flags.DEFINE_integer("tokens", 512, "tokens of the sequence when it is first preempted", lower_bound=2)
_PAGES = flags.DEFINE_list("page_sizes", ["1", "4", "16", "64", "256"], "tokens a page")
_REPEAT = flags.DEFINE_integer("repeat", 7, "preemptions of each kind; the best counts", lower_bound=1)
_DTYPE = flags.DEFINE_enum("dtype", "auto", ["auto", "bfloat16", "float32"], "weights, activations and pages")
_MODEL = flags.DEFINE_string("model", "default", "as config.model.path")
_OUTPUT = flags.DEFINE_string("output", "", "where to write the figures as JSON")
ROOT = pathlib.Path(__file__).resolve().parents[1]
WAYS = ("recompute", "swap")


def make_engine(loaded: LoadedModel, page_size: int, way: str) -> Engine:
    """An engine for one sequence, which does one decode step at a time."""
    longest = _TOKENS.value + _REPEAT.value + 8
    pages = -(-longest // page_size) + 2
    options = {
        "model.dtype": _DTYPE.value,
        "model.max_model_len": longest,
        "cache.page_size": page_size,
        "cache.num_pages": pages,
        "cache.prefix_caching": False,
        "cache.host_pages": pages,
        "scheduler.preemption": way,
        "scheduler.max_num_seqs": 1,
        "runner.lane_buckets": (1,),
        "runner.max_steps": 1,
        "runner.overlap": False,
    }
    return build_engine(with_overrides(Config(), options), loaded=loaded, progress=False)


class Sequence:
    """One sequence in an engine of its own.

    Attributes:
      tokens: what it has generated.
    """

    def __init__(self, engine: Engine, prompt: tuple[int, ...]) -> None:
        self.engine, self.tokens = engine, list[int]()
        params = SamplingParams(temperature=0, max_tokens=_REPEAT.value + 2, ignore_eos=True, detokenize=False)
        engine.add_request(Request("one", prompt, params))

    def next_token(self) -> None:
        """Step until there is one more."""
        before = len(self.tokens)
        while len(self.tokens) == before:
            for delta in self.engine.step():
                self.tokens += delta.outputs[0].token_ids

    def come_back(self) -> dict[str, float]:
        """Preempt it, and go on to its next token; seconds by part."""
        jax.block_until_ready(self.engine.runner.state)
        started = time.perf_counter()
        self.engine._preempt()
        out = time.perf_counter()
        self.engine._admit()
        jax.block_until_ready(self.engine.runner.state)
        back = time.perf_counter()
        self.next_token()
        end = time.perf_counter()
        if self.engine.config.scheduler.preemption == "recompute":
            return {"recompute": end - started}
        assert self.engine.counters.swapped_in_pages, "pages came back from the host"
        return {"swap_out": out - started, "swap_in": back - out}


def measure(loaded: LoadedModel, page_size: int) -> tuple[dict[str, float], bool]:
    """Best milliseconds of each part, and whether the tokens are those of an undisturbed run."""
    prompt = tuple(np.random.default_rng(5).integers(100, loaded.spec.vocab_size - 100, _TOKENS.value).tolist())
    sequences = {way: Sequence(make_engine(loaded, page_size, way), prompt) for way in WAYS}
    best: dict[str, float] = {}
    for sequence in sequences.values():
        sequence.next_token()
    for turn in range(_REPEAT.value):
        for sequence in sequences.values():
            for part, seconds in sequence.come_back().items():
                if turn or _REPEAT.value == 1:  # the first touches fresh memory
                    best[part] = min(best.get(part, float("inf")), 1e3 * seconds)
    assert sequences["recompute"].engine.counters.preemptions == _REPEAT.value
    calm = Sequence(make_engine(loaded, page_size, "recompute"), prompt)
    for _ in range(_REPEAT.value + 1):
        calm.next_token()
    return best, all(sequence.tokens == calm.tokens for sequence in sequences.values())


def main(argv: list[str]) -> None:
    del argv
    loaded = load_model(_MODEL.value, sizing.model_dtype(with_overrides(Config(), {"model.dtype": _DTYPE.value})))
    figures, same = {}, {}
    for size in tqdm([int(size) for size in _PAGES.value], desc="Measuring", unit="page size"):
        figures[size], same[size] = measure(loaded, size)
    for size, best in figures.items():
        swap = best["swap_out"] + best["swap_in"]
        print(
            f"page {size:3d}: recompute {best['recompute']:7.1f} ms, swap {swap:7.1f} ms (out {best['swap_out']:.1f}, in "
            f"{best['swap_in']:.1f}){'' if same[size] else ', other tokens'}"
        )
    if _OUTPUT.value:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
        info = {"machine": machine.describe(), "commit": commit.stdout.strip(), "command": machine.command()}
        setting = {"model": loaded.name, "tokens": _TOKENS.value, "jax": jax.__version__}
        pathlib.Path(_OUTPUT.value).write_text(
            json.dumps({**info, **setting, "milliseconds": figures, "same_tokens": same}, indent=1)
        )


if __name__ == "__main__":
    app.run(main)
