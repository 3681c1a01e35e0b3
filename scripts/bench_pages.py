#!/usr/bin/env python3
"""Microseconds of each page verb, compiled and donated, against the number of pages: they should not grow with it.

  .venv/bin/python scripts/bench_pages.py --sizes=10000,100000,1000000 --output=benchmarks/pages.json

64 rows of 16 to 17 pages grow, fork, copy, publish, end and are found again, over and over; each call is timed on its
own. Printed is the fastest over the cycles, as other work may share the machine; the file has the medians too. "dispatch"
is a call that changes nothing, that is what handing over the state costs; a verb inside a larger compiled step does not
pay it. "step in a loop" is one step of the device's decode loop that needs no page, per step.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import machine
import numpy as np
from absl import app, flags

from pagedjax import pages as verbs
from pagedjax.pages import Pages

_SIZES = flags.DEFINE_list("sizes", ["10000", "100000", "1000000"], "numbers of pages N")
_CYCLES = flags.DEFINE_integer("cycles", 100, "timed calls of each verb")
_OUTPUT = flags.DEFINE_string("output", "", "where to write the figures as JSON")

R, P, S, LENGTH = 64, 128, 16, 16
FEW = 8  # rows that are admitted or settled at once
LOOP = 1000


def touch(pages: Pages) -> tuple[Pages, None]:
    """As little as a call can do."""
    return pages.replace(head=pages.head + 0), None


def step(pages: Pages, rows: jax.Array, need: jax.Array, logical: jax.Array) -> tuple[Pages, jax.Array]:
    """The page work of a decode step."""
    short = jnp.sum(verbs.cow_need(pages, rows, logical)) + jnp.sum(need) > pages.num_unowned
    pages, grown = verbs.alloc(pages, jnp.where(short, R, rows), need, max_total=R)
    pages, _, own = verbs.cow(pages, jnp.where(grown, rows, R), logical)
    return pages, own


def loop(pages: Pages, rows: jax.Array, need: jax.Array, logical: jax.Array) -> tuple[Pages, None]:
    """Many such steps in one call."""
    return jax.lax.fori_loop(0, LOOP, lambda i, pages: step(pages, rows, need, logical)[0], pages), None


def compiled(pages: Pages) -> dict[str, Callable]:
    """Each verb for the shapes it is timed at."""
    rows, few = jnp.arange(R, dtype=jnp.int32), jnp.arange(FEW, dtype=jnp.int32)
    texts = jnp.zeros((FEW, P * S), jnp.int32)
    work: dict[str, tuple[Callable, tuple]] = {
        "dispatch": (touch, ()),
        "alloc 64 x 16": (verbs.alloc, (rows, rows)),
        "alloc 64 x 1": (functools.partial(verbs.alloc, max_total=R), (rows, rows)),
        "alloc nothing": (functools.partial(verbs.alloc, max_total=R), (rows, rows)),
        "remap: 32 forks": (verbs.remap, (rows, rows)),
        "remap: 64 ends": (verbs.remap, (rows, rows)),
        "cow_need": (lambda pages, *args: (pages, verbs.cow_need(pages, *args)), (rows, rows)),
        "cow: 32 copies": (verbs.cow, (rows, rows)),
        "cow nothing": (verbs.cow, (rows, rows)),
        "publish 8 x 16": (verbs.publish, (few, texts, few, few)),
        "match 8 x 16": (verbs.match, (few, texts, few, few)),
        "decode step": (step, (rows, rows, rows)),
        "step in a loop": (loop, (rows, rows, rows)),
    }
    return {name: jax.jit(fn, donate_argnums=0).lower(pages, *args).compile() for name, (fn, args) in work.items()}


class Clock:
    """Calls verbs on a state and keeps how long they took."""

    def __init__(self, num_pages: int):
        self.pages = verbs.init_pages(num_pages=num_pages, page_size=S, max_rows=R, max_pages_per_row=P, secret=(1, 2))
        self.calls = compiled(self.pages)
        self.seconds: dict[str, list[float]] = {name: [] for name in self.calls}

    def __call__(self, name: str, *args: jax.Array) -> Any:
        started = time.perf_counter()
        self.pages, *results = jax.block_until_ready(self.calls[name](self.pages, *args))
        self.seconds[name].append(time.perf_counter() - started)
        return results


def cycle(clock: Clock, number: int) -> None:
    """Rows grow, publish, fork, copy and end; then the next prompts find what was published."""
    rows, few = jnp.arange(R, dtype=jnp.int32), jnp.arange(FEW, dtype=jnp.int32)
    zeros, ones = jnp.zeros(R, jnp.int32), jnp.ones(R, jnp.int32)
    texts = np.zeros((FEW, P * S), np.int32)
    texts[:, 0], texts[:, 1] = number, np.arange(FEW)
    texts, nothing = jnp.asarray(texts), jnp.zeros(FEW, jnp.int32)
    clock("dispatch")
    clock("alloc 64 x 16", rows, LENGTH * ones)
    clock("alloc 64 x 1", rows, ones)
    clock("alloc nothing", rows, zeros)
    (count,) = clock("publish 8 x 16", few, texts, jnp.full(FEW, LENGTH * S, jnp.int32), nothing)
    assert (count == LENGTH).all()
    clock("remap: 32 forks", rows, rows % (R // 2))
    clock("cow_need", rows, LENGTH * ones)
    copies, ok = clock("cow: 32 copies", rows, LENGTH * ones)
    assert int((copies[:, 1] < clock.pages.total_pages).sum()) == R // 2
    assert ok.all()
    clock("cow nothing", rows, LENGTH * ones)
    clock("decode step", rows, zeros, LENGTH * ones)
    clock("step in a loop", rows, zeros, LENGTH * ones)
    clock("remap: 64 ends", rows, R * ones)
    (found,) = clock("match 8 x 16", few, texts, jnp.full(FEW, LENGTH * S + 1, jnp.int32), nothing)
    assert (found == LENGTH).all()
    clock.pages, _ = clock.calls["remap: 64 ends"](clock.pages, rows, R * ones)


def measure(num_pages: int, cycles: int) -> dict[str, dict[str, float]]:
    """Least and median microseconds of each verb."""
    clock = Clock(num_pages)
    for number in range(cycles + 3):
        cycle(clock, number)
    broken = verbs.check(clock.pages)
    assert not broken, broken
    scale = {name: 1e6 / (LOOP if name == "step in a loop" else 1) for name in clock.seconds}
    return {
        name: {"min": scale[name] * min(seconds[3:]), "median": scale[name] * statistics.median(seconds[3:])}
        for name, seconds in clock.seconds.items()
    }


def main(argv: list[str]) -> None:
    del argv
    sizes = [int(size) for size in _SIZES.value]
    results = {}
    for size in sizes:
        print(f"N = {size:,} ...", file=sys.stderr, flush=True)
        results[size] = measure(size, _CYCLES.value)
    print(f"{'microseconds':18s}" + "".join(f"{f'N = {size:,}':>16s}" for size in sizes))
    for name in results[sizes[0]]:
        print(f"{name:18s}" + "".join(f"{results[size][name]['min']:16.1f}" for size in sizes))
    if _OUTPUT.value:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=pathlib.Path(__file__).parent, capture_output=True, text=True, check=False
        ).stdout.strip()
        report = {
            "machine": machine.describe(),
            "jax": jax.__version__,
            "device": jax.devices()[0].device_kind,
            "commit": commit,
            "command": machine.command(),
            "rows": R,
            "pages_per_row": P,
            "page_size": S,
            "microseconds": results,
        }
        path = pathlib.Path(_OUTPUT.value)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
