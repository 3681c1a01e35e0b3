#!/usr/bin/env python3
"""Decode attention of each backend: is it right, and how much of the memory's bandwidth does it get?

  .venv/bin/python scripts/bench_kernels.py --output=benchmarks/kernels.json                          # on a GPU or TPU
  JAX_PLATFORMS=cpu .venv/bin/python scripts/bench_kernels.py --backends=native_cpu,xla --batches=1,8 \\
    --contexts=128,1024 --heads=9/3 --head_dim=64 --cold_mib=64 --copy_mib=64
  .venv/bin/python scripts/bench_kernels.py --results=benchmarks/kernels.json --plot=kernels.png  # draws, measures nothing

First each backend is held against `reference` on decode rows and on a mixed batch; one that is off ends the run with an
error. Then it decodes: rows of `context` tokens each, pages scattered over the pool. Bandwidth is the bytes of the keys
and values seen, over the time of one call; what a plain addition gets, reading and writing, is measured in the same run
and is what `share` refers to. Layers are taken in turns, so that no cache holds what is read. With --contiguous the same rows
are decoded over contiguous keys and values by others' kernels; `paging` is our time over the fastest of theirs, less one.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import subprocess
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import machine
from absl import app, flags
from contiguous import CONTIGUOUS, contiguous_seconds
from jax import lax
from kernel_calls import TOLERANCE, Model, best_seconds, call_seconds, cold_layers, error

_BACKENDS = flags.DEFINE_list("backends", ["auto"], "attention backends")
_BATCHES = flags.DEFINE_list("batches", ["1", "8", "64", "256"], "numbers of rows")
_CONTEXTS = flags.DEFINE_list("contexts", ["128", "1024", "4096", "32768"], "tokens a row")
_HEADS = flags.DEFINE_list("heads", ["32/32", "32/8", "64/8"], "query heads/KV heads")
_DIM = flags.DEFINE_integer("head_dim", 128, "head dim", lower_bound=1)
_PAGES = flags.DEFINE_list("page_sizes", ["16", "64"], "tokens a page")
_DTYPE = flags.DEFINE_string("dtype", "bfloat16", "of the queries; and of the pages, unless --kv_dtype")
_KV_DTYPE = flags.DEFINE_string("kv_dtype", "", "of the pages, also int8 or float8_e4m3fn; empty: as --dtype")
_CONTIGUOUS = flags.DEFINE_list("contiguous", [], f"what to compare with, of {', '.join(CONTIGUOUS)}")
_SECONDS = flags.DEFINE_float("seconds", 0, "begin no shape after so many seconds; 0: no limit", lower_bound=0)
_LIMIT = flags.DEFINE_float("max_gib", 16, "shapes whose pages take more are left out")
_COLD = flags.DEFINE_integer("cold_mib", 512, "as many layers as hold this much, several times the device's cache")
_COPY = flags.DEFINE_integer("copy_mib", 1024, "size of the array whose addition gives the bandwidth", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 16, "calls in one compiled loop", lower_bound=1)
_REPEAT = flags.DEFINE_integer("repeat", 5, "timings of each loop; the best counts", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", "", "where to write the figures as JSON")
_PLOT = flags.DEFINE_string("plot", "", "where to draw the bandwidth over the context, as PNG; needs pagedjax[plots]")
_RESULTS = flags.DEFINE_string("results", "", "a JSON of --output to draw instead of measuring")


class Shape(NamedTuple):
    """Attributes: query and KV heads, tokens a page, rows, tokens a row."""

    heads: int
    kv_heads: int
    page: int
    batch: int
    context: int

    @property
    def model(self) -> Model:
        """The rest is in the flags."""
        kv_dtype = _KV_DTYPE.value or _DTYPE.value
        return Model(self.heads, self.kv_heads, _DIM.value, self.page, _DTYPE.value, kv_dtype)


def copy_bandwidth() -> float:
    """GB/s of x + 1, read and written in place: new memory would have to be mapped first."""
    x = jnp.zeros(_COPY.value << 18, jnp.float32)
    add = jax.jit(lambda x: lax.fori_loop(0, _STEPS.value, lambda _, x: x + 1, x))
    return 2 * x.nbytes * _STEPS.value / best_seconds(lambda: add(x), _REPEAT.value) / 1e9


def check(backend: str, heads: int, kv_heads: int, page: int) -> dict[str, float]:
    """Errors on decode and mixed batches (if it serves those); too large a one ends the program."""
    model = Shape(heads, kv_heads, page, 4, 700).model
    errors = {"decode": error(backend, model, [1, 1, 1, 1], [700, 1, page, page + 1])}
    try:
        errors["mixed"] = error(backend, model, [1, 130, 7, 1], [600, 130, 300, 5])
    except NotImplementedError as reason:
        print(reason, file=sys.stderr)
    for kind, size in errors.items():
        if size > TOLERANCE[_DTYPE.value]:
            raise SystemExit(
                f"{backend} is wrong: {kind} of {heads}/{kv_heads} heads, page {page}: off by {size:.2g}, "
                f"allowed is {TOLERANCE[_DTYPE.value]}"
            )
    return errors


def measure(backend: str, shape: Shape, copy: float) -> dict | None:
    """The figures of one shape; None where it does not fit."""
    tokens = shape.batch * shape.context
    size, num_layers = tokens * shape.model.token_bytes, cold_layers(shape.model, tokens, _COLD.value << 20)
    if num_layers * size > _LIMIT.value * 2**30:
        return None
    seconds = call_seconds(
        backend,
        shape.model,
        [1] * shape.batch,
        [shape.context] * shape.batch,
        width=shape.context,
        num_layers=num_layers,
        steps=_STEPS.value,
        repeat=_REPEAT.value,
    )
    rate = size / seconds / 1e9
    return {"backend": backend, **shape._asdict(), "us": seconds * 1e6, "gb_per_s": rate, "share": rate / copy}


def compared(shape: Shape) -> dict[str, float | str]:
    """Microseconds a call over contiguous keys and values, by each implementation; or the reason why it cannot serve."""
    tokens = shape.batch * shape.context
    num_layers = cold_layers(shape.model, tokens, _COLD.value << 20)
    found: dict[str, float | str] = {}
    for name in _CONTIGUOUS.value:
        try:
            seconds = contiguous_seconds(
                name,
                shape.model,
                shape.batch,
                shape.context,
                num_layers=num_layers,
                steps=_STEPS.value,
                repeat=_REPEAT.value,
            )
            found[name] = seconds * 1e6
        except NotImplementedError as reason:
            found[name] = str(reason)
    return found


def checked(backend: str, heads: int, kv_heads: int, page: int) -> dict:
    """`check` with what it was about; a backend that cannot serve ends the program with its reason."""
    try:
        errors = check(backend, heads, kv_heads, page)
    except NotImplementedError as reason:
        raise SystemExit(str(reason)) from reason
    return {"backend": backend, "heads": heads, "kv_heads": kv_heads, "page": page, **errors}


def main(argv: list[str]) -> None:
    del argv
    if _RESULTS.value and not _PLOT.value:
        raise app.UsageError("--results is what --plot draws: name a file for it")
    report = json.loads(pathlib.Path(_RESULTS.value).read_text()) if _RESULTS.value else measured()
    if _OUTPUT.value:
        path = pathlib.Path(_OUTPUT.value)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
    if _PLOT.value:
        draw(report, pathlib.Path(_PLOT.value))


def measured() -> dict[str, Any]:
    """Checks and times everything that the flags ask for, printing as it goes: the report."""
    started = time.monotonic()
    if unknown := set(_CONTIGUOUS.value) - set(CONTIGUOUS):
        raise app.UsageError(f"--contiguous: must be of {', '.join(CONTIGUOUS)}, got {', '.join(sorted(unknown))}")
    copy = copy_bandwidth()
    print(f"{jax.devices()[0].device_kind}: an addition reads and writes {copy:.1f} GB/s")
    checks, results = [], []
    columns = f"{'backend':11s}{'heads':>8s}{'page':>6s}{'rows':>6s}{'context':>9s}{'us':>11s}{'GB/s':>9s}{'share':>8s}"
    print(
        columns
        + "".join(f"{name + ' us':>11s}" for name in _CONTIGUOUS.value)
        + (" paging" if _CONTIGUOUS.value else "")
    )
    others: dict[Shape, dict[str, float | str]] = {}
    skipped = 0
    for backend, text, page in itertools.product(_BACKENDS.value, _HEADS.value, map(int, _PAGES.value)):
        heads, kv_heads = (int(n) for n in text.split("/"))
        checks.append(checked(backend, heads, kv_heads, page))
        for batch, context in itertools.product(map(int, _BATCHES.value), map(int, _CONTEXTS.value)):
            if _SECONDS.value and time.monotonic() - started > _SECONDS.value:
                skipped += 1
                continue
            line = f"{backend:11s}{text:>8s}{page:6d}{batch:6d}{context:9d}"
            shape = Shape(heads, kv_heads, page, batch, context)
            found = measure(backend, shape, copy)
            if found is None:
                print(f"{line}   more than {_LIMIT.value:g} GiB", file=sys.stderr)
                continue
            contiguous = shape._replace(page=0)
            if contiguous not in others:
                others[contiguous] = compared(shape)
            times = {name: t for name, t in others[contiguous].items() if isinstance(t, float)}
            found |= {"contiguous_us": times, "paging": found["us"] / min(times.values()) - 1 if times else None}
            results.append(found)
            line += f"{found['us']:11.1f}{found['gb_per_s']:9.1f}{found['share']:8.1%}"
            line += "".join(f"{times[name]:11.1f}" if name in times else f"{'-':>11s}" for name in _CONTIGUOUS.value)
            print(line + (f"{found['paging']:+7.0%}" if times else ""), flush=True)
    for reason in {text for found in others.values() for text in found.values() if isinstance(text, str)}:
        print(f"not compared: {reason}", file=sys.stderr)
    if skipped:
        print(f"{skipped} shapes left out: --seconds={_SECONDS.value:g} were over", file=sys.stderr)
    return described(copy, checks, results)


def described(copy: float, checks: list[dict], results: list[dict]) -> dict[str, Any]:
    """The report: what was found, and on what."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=pathlib.Path(__file__).parent, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "machine": machine.describe(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "commit": commit,
        "command": machine.command(),
        "head_dim": _DIM.value,
        "dtype": _DTYPE.value,
        "kv_dtype": _KV_DTYPE.value or _DTYPE.value,
        "copy_gb_per_s": copy,
        "largest_error": checks,
        "decode": results,
    }


def draw(report: dict[str, Any], path: pathlib.Path) -> None:
    """Bandwidth over context, a line for each number of rows and page size, a panel for each backend and head count."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = report["decode"]
    panels = sorted({(r["backend"], r["heads"], r["kv_heads"]) for r in rows}, key=str)
    lines = sorted({(r["batch"], r["page"]) for r in rows})
    if not panels:
        raise SystemExit("there is nothing to draw: no shape was measured")
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(1.5 + 4 * len(panels), 4), sharey=True, squeeze=False, layout="constrained"
    )
    batches, pages = sorted({b for b, _ in lines}), sorted({p for _, p in lines})
    for axis, panel in zip(axes[0], panels, strict=True):
        for batch, page in lines:
            found = [r for r in rows if (r["backend"], r["heads"], r["kv_heads"]) == panel]
            found = sorted((r["context"], r["gb_per_s"]) for r in found if (r["batch"], r["page"]) == (batch, page))
            style = {
                "color": f"C{batches.index(batch) % 10}",
                "linestyle": ("-", "--", ":", "-.")[pages.index(page) % 4],
            }
            if found:
                axis.plot(*zip(*found, strict=True), marker="o", label=f"{batch} rows, pages of {page}", **style)
        axis.axhline(report["copy_gb_per_s"], color="grey", linewidth=0.8, label="plain addition")
        axis.set(xscale="log", title="{}, {}/{} heads".format(*panel), xlabel="tokens a row", ylim=(0, None))
        contexts = sorted({r["context"] for r in rows})
        axis.set_xticks(contexts, map(str, contexts))
        axis.minorticks_off()
    axes[0][0].set_ylabel("keys and values read, GB/s")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.suptitle(
        f"Decode attention on {report['device']}, {report['kv_dtype']} pages, head dim {report['head_dim']}"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    app.run(main)
