#!/usr/bin/env python3
"""How many pages sharing saves: parallel samples and beam search on the default model, beside the paper's figures.

  .venv/bin/python scripts/bench_sharing.py --output=benchmarks/sharing.json

Saved = 1 - distinct pages / mapped pages, summed over all steps: what would be mapped without sharing is what the page
tables name, and what is held is each page once (Kwon et al., SOSP 2023, Fig. 15: Alpaca, OPT-13B). Prompts and outputs
are as long as Alpaca's on average (19 and 58 tokens), geometrically distributed; prompts are cut from the licence text,
so nothing is shared between requests. A pool of another model meets other probabilities: which beams survive decides.
"""

from __future__ import annotations

import json
import pathlib
import subprocess

import machine
import numpy as np
from absl import app, flags
from tqdm import tqdm

from pagedjax import LLM, Request, SamplingParams

_REQUESTS = flags.DEFINE_integer("requests", 24, "requests of each kind", lower_bound=1)
_WIDTHS = flags.DEFINE_list("widths", ["2", "4", "6"], "samples and beams")
_OUTPUT = flags.DEFINE_string("output", "", "where to write the figures as JSON")
ROOT = pathlib.Path(__file__).resolve().parents[1]
PAPER = {"parallel": {2: 6.09, 4: 8.53, 6: 9.79}, "beam": {2: 37.56, 4: 53.13, 6: 55.16}}
MEAN_PROMPT, MEAN_OUTPUT = 19.31, 58.45


def lengths(rng: np.random.Generator, mean: float, num: int, most: int) -> list[int]:
    """Geometric lengths of the given mean, 1 to most."""
    return np.minimum(rng.geometric(1 / mean, num), most).tolist()


def saved(llm: LLM, requests: list[Request]) -> float:
    """Percent of the mapped pages that sharing saved, over all steps."""
    engine, mapped, distinct = llm.engine, 0, 0
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished():
        engine.step()
        table = engine.runner.page_table()
        named = table[table != 0]
        mapped, distinct = mapped + named.size, distinct + np.unique(named).size
    return 100 * (1 - distinct / mapped)


def requests(llm: LLM, kind: str, width: int) -> list[Request]:
    """The same prompts and lengths whatever the kind; a cache salt each, so that nothing is shared between them."""
    rng = np.random.default_rng(7)
    text = llm.engine.loaded.encode((ROOT / "LICENSE").read_text())
    made = []
    num = _REQUESTS.value
    for i, (prompt, output) in enumerate(
        zip(lengths(rng, MEAN_PROMPT, num, 200), lengths(rng, MEAN_OUTPUT, num, 300), strict=True)
    ):
        start = int(rng.integers(len(text) - prompt))
        if kind == "beam":
            sampling = SamplingParams(n=width, beam_width=width, max_tokens=output, ignore_eos=True)
        else:
            sampling = SamplingParams(n=width, temperature=1.0, seed=i, max_tokens=output, ignore_eos=True)
        name = f"{kind}-{width}-{i}"
        made.append(Request(name, tuple(text[start : start + prompt]), sampling, cache_salt=name))
    return made


def main(argv: list[str]) -> None:
    del argv
    # Short dispatches: the tables are looked at after each.
    llm = LLM(progress=True, model__max_model_len=512, runner__max_steps=4)
    widths = [int(w) for w in _WIDTHS.value]
    figures: dict[str, dict[int, float]] = {kind: {} for kind in PAPER}
    for kind, width in tqdm([(k, w) for k in PAPER for w in widths], desc="Measuring", unit="run"):
        figures[kind][width] = round(saved(llm, requests(llm, kind, width)), 2)
    for kind, by_width in figures.items():
        for width, percent in by_width.items():
            print(f"{kind:9s} {width}: {percent:6.2f} % saved (paper: {PAPER[kind].get(width, float('nan')):.2f} %)")
    if _OUTPUT.value:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
        info = {"machine": machine.describe(), "commit": commit.stdout.strip(), "command": machine.command()}
        pathlib.Path(_OUTPUT.value).write_text(json.dumps({**info, "percent_saved": figures, "paper": PAPER}, indent=1))


if __name__ == "__main__":
    app.run(main)
