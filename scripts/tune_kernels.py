#!/usr/bin/env python3
"""Measures sizes of blocks, tiles and splits on this device, and writes the best of them where the kernels look for them.

  .venv/bin/python scripts/tune_kernels.py --heads=32/8 --head_dims=128 --page_sizes=16,64         # on a GPU
  JAX_PLATFORMS=cpu .venv/bin/python scripts/tune_kernels.py --kernels=native_cpu.attention,xla.decode --heads=9/3 \\
    --head_dims=64 --batches=8 --contexts=512 --cold_mib=64 --steps=4

For each kernel and shape class (dtypes, head dim, heads per KV head, page size) it begins with what heuristics say and
changes one field after the other, as long as that helps (--search=all: tries every combination). A candidate that does
not compile, differs from `reference`, or makes a row's result depend on the other rows is dropped. The figure of a
candidate is the geometric mean of its times over --batches x --contexts (decode) or over --prompts (prefill): a
configuration may not depend on the batch. One that gains less than --min_gain over the heuristics is not worth an entry.

The file is <user's cache folder>/tuned/<device>.json, whose other entries are kept; it is read at the next start. To ship
it with the package, move it to kernels/pagedjax_kernels/tuned.
"""

from __future__ import annotations

import collections
import itertools
import json
import math
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import jax.numpy as jnp
import kernel_calls
import machine
import numpy as np
from absl import app, flags
from kernel_calls import TOLERANCE, Model
from pagedjax_kernels import dispatch, tuning
from pagedjax_kernels.folders import cache_folder
from pagedjax_kernels.hardware import current_hardware
from pagedjax_kernels.native_cpu.ops import attention_tiling
from pagedjax_kernels.paged_attention import triton, xla_decode, xla_prefill
from pagedjax_kernels.paged_attention.api import BACKENDS
from tqdm import tqdm

_KERNELS = flags.DEFINE_list("kernels", [], "of pagedjax_kernels.tuning; empty: those of the backend that serves here")
_HEADS = flags.DEFINE_list("heads", ["32/8"], "query heads/KV heads; their quotient is what counts")
_DIMS = flags.DEFINE_list("head_dims", ["128"], "head dims")
_PAGES = flags.DEFINE_list("page_sizes", ["16"], "tokens a page")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", list(TOLERANCE), "of the queries")
_KV_DTYPES = flags.DEFINE_list("kv_dtypes", [], "of the pages, also int8 and float8_e4m3fn; empty: as --dtype")
_BATCHES = flags.DEFINE_list("batches", ["1", "16", "128"], "rows of a decode call")
_CONTEXTS = flags.DEFINE_list("contexts", ["512", "8192"], "tokens of its rows")
_PROMPTS = flags.DEFINE_list("prompts", ["1x2048", "4x512+2048"], "prefill calls: rows x queries [+ tokens before]")
_SEARCH = flags.DEFINE_enum("search", "turns", ["turns", "all"], "one field after the other, or all combinations")
_GAIN = flags.DEFINE_float("min_gain", 0.03, "share of the time that has to be saved", lower_bound=0, upper_bound=1)
_COLD = flags.DEFINE_integer("cold_mib", 256, "as many layers as hold this much, several times the device's cache")
_STEPS = flags.DEFINE_integer("steps", 16, "calls in one compiled loop", lower_bound=1)
_REPEAT = flags.DEFINE_integer("repeat", 5, "timings of each loop; the best counts", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", "", "the file; empty: this device's in the cache folder")

Config = dict[str, int]


class Subject(NamedTuple):
    """What can be tuned. Attributes: the backend, its tiling of a case, whether decode and prefill calls run it, values."""

    backend: str
    tiling: Callable[[Any], Any]
    decode: bool
    prefill: bool
    values: dict[str, Sequence[int]]


SUBJECTS = {
    "triton.decode": Subject(
        "triton",
        triton.decode_tiling,
        True,
        False,
        {
            "block_n": (16, 32, 64, 128),
            "warps": (1, 2, 4, 8),
            "stages": (1, 2, 3, 4, 5, 6),
            "splits": (8, 16, 32, 64),
            "min_span": (64, 128, 256, 512, 1024, 2048),
        },
    ),
    "triton.prefill": Subject(
        "triton",
        triton.prefill_tiling,
        False,
        True,
        {"block_m": (16, 32, 64, 128), "block_n": (16, 32, 64, 128), "warps": (4, 8), "stages": (1, 2, 3, 4, 5)},
    ),
    "xla.decode": Subject(
        "xla",
        xla_decode.decode_tiling,
        True,
        False,
        {"rows": (1, 2, 4, 8, 16, 32, 64, 256), "block_tokens": (16, 32, 64, 128, 256, 512)},
    ),
    "xla.prefill": Subject(
        "xla",
        xla_prefill.prefill_tiling,
        False,
        True,
        {"tile_queries": (32, 64, 128, 256, 512), "block_tokens": (32, 64, 128, 256, 512)},
    ),
    "native_cpu.attention": Subject(
        "native_cpu", attention_tiling, True, False, {"chunk": (64, 128, 256, 512, 1024, 2048, 4096)}
    ),
}


class Dropped(Exception):  # noqa: N818  a verdict
    """Why a candidate is none."""


def workloads(subject: Subject) -> list[tuple[str, list[int], list[int]]]:
    """(name, q_lens, kv_lens) of the calls that are timed."""
    found = []
    if subject.decode:
        for batch, context in itertools.product(map(int, _BATCHES.value), map(int, _CONTEXTS.value)):
            found.append((f"{batch}x{context}", [1] * batch, [context] * batch))
    for text in _PROMPTS.value if subject.prefill else []:
        rows, _, rest = text.partition("x")
        queries, _, before = rest.partition("+")
        try:
            lens = [int(n or 0) for n in (rows, queries, before)]
        except ValueError as error:
            raise app.UsageError(f"--prompts: rows x queries [+ tokens before], as 4x512+2048, got {text!r}") from error
        found.append((text, [lens[1]] * lens[0], [lens[1] + lens[2]] * lens[0]))
    return found


def assert_independent(subject: Subject, model: Model, config: Config) -> None:
    """A row alone has the same bits as among others: decoded as the only row, or prefilled in the same shapes."""
    if subject.decode:  # more rows than go through a loop together
        kv_lens = [(700, 1, 300, 17, 64)[i % 5] for i in range(config.get("rows", 0) + 5)]
        q_lens, some = [1] * len(kv_lens), (0, 2, len(kv_lens) - 1)
    else:
        q_lens, kv_lens, some = [1, 130, 7], [600, 130, 300], (1, 2)
    cache, table = kernel_calls.make(model, len(kv_lens), max(kv_lens), 2)
    q, lens, cu = kernel_calls.ragged(model, q_lens, kv_lens)
    run = kernel_calls.attend(subject.backend, 1 if subject.decode else None)
    together = np.asarray(run(q, cache, 1, table, lens, cu))
    row = jnp.arange(len(kv_lens) + 1, dtype=jnp.int32)
    for b in some:
        own = slice(int(cu[b]), int(cu[b + 1]))
        if subject.decode:
            pages = table[b : b + 1, : model.pages(kv_lens[b])]
            got = run(q[own], cache, 1, pages, lens[b : b + 1], row[:2])
        else:
            only = jnp.where(row[:-1] == b, lens, 0)
            got = run(jnp.roll(q, -own.start, axis=0), cache, 1, table, only, jnp.where(row > b, q_lens[b], 0))
        if not np.array_equal(np.asarray(got)[: q_lens[b]], together[own]):
            raise Dropped("makes a row depend on the others")


class Timer:
    """Times of one kernel and model, each configuration once.

    Attributes:
      names: of the workloads.
      found: configuration (its items) -> seconds a workload, or why it was dropped.
    """

    def __init__(self, kernel: str, model: Model, bar: tqdm):
        self.kernel, self.model, self.bar = kernel, model, bar
        self.subject = SUBJECTS[kernel]
        self.calls = workloads(self.subject)
        self.names = [name for name, _, _ in self.calls]
        self.found: dict[tuple, list[float] | str] = {}

    def seconds(self, config: Config) -> float:
        """The geometric mean; infinite for what was dropped."""
        key = tuple(config.items())
        if key not in self.found:
            self.bar.set_postfix_str(" ".join(f"{name}={value}" for name, value in config.items()))
            try:
                self.found[key] = self.measure(config)
            except Dropped as reason:
                self.found[key] = str(reason)
            except Exception as error:  # whatever a compiler or a device says to it
                self.found[key] = f"fails: {(str(error).splitlines() or [type(error).__name__])[0][:200]}"
            self.bar.update()
        return mean(self.found[key])

    def again(self, config: Config) -> None:
        """Times a configuration that is right once more, by the better of both."""
        key = tuple(config.items())
        old = self.found[key]
        if not isinstance(old, str):
            with tuning.forced({self.kernel: config}):
                new = [self.time(q_lens, kv_lens) for _, q_lens, kv_lens in self.calls]
            self.found[key] = [min(pair) for pair in zip(old, new, strict=True)]

    def measure(self, config: Config) -> list[float]:
        with tuning.forced({self.kernel: config}):
            q_lens, kv_lens = (
                ([1] * 4, [700, 1, 16, 17]) if self.subject.decode else ([1, 130, 7, 1], [600, 130, 300, 5])
            )
            off = kernel_calls.error(self.subject.backend, self.model, q_lens, kv_lens)
            if off > TOLERANCE[self.model.dtype]:
                raise Dropped(f"is off by {off:.2g}")
            assert_independent(self.subject, self.model, config)
            return [self.time(q_lens, kv_lens) for _, q_lens, kv_lens in self.calls]

    def time(self, q_lens: list[int], kv_lens: list[int]) -> float:
        layers = kernel_calls.cold_layers(self.model, sum(kv_lens), _COLD.value << 20)
        return kernel_calls.call_seconds(
            self.subject.backend,
            self.model,
            q_lens,
            kv_lens,
            width=max(max(lens) for _, _, lens in self.calls),  # one compiled kernel for all of them
            num_layers=layers,
            steps=_STEPS.value,
            repeat=_REPEAT.value,
        )

    def microseconds(self, config: Config) -> dict[str, float] | str:
        """By workload, or why the configuration was dropped."""
        found = self.found[tuple(config.items())]
        return (
            found if isinstance(found, str) else dict(zip(self.names, (round(t * 1e6, 2) for t in found), strict=True))
        )


def mean(times: list[float] | str) -> float:
    """Geometric."""
    return math.inf if isinstance(times, str) else math.exp(sum(map(math.log, times)) / len(times))


def candidates(kernel: str, model: Model, start: Config, timer: Timer) -> Iterator[Config]:
    """What is worth a try; of --search=turns, that depends on the times so far."""
    subject, shape = SUBJECTS[kernel], model.case([1], [1]).shape_class
    possible = lambda config: tuning.problem(kernel, shape, config) is None  # noqa: E731
    if _SEARCH.value == "all":
        for values in itertools.product(*subject.values.values()):
            config = dict(zip(subject.values, values, strict=True))
            if possible(config):
                yield config
        return
    best, improved = start, True
    while improved:
        improved = False
        for name, values in subject.values.items():
            for value in values:
                config = {**best, name: value}
                if possible(config):
                    yield config
            nearest = min((dict(key) for key in timer.found), key=timer.seconds)
            improved, best = improved or timer.seconds(nearest) < timer.seconds(best), nearest


def tune(kernel: str, model: Model) -> tuple[str, dict | None]:
    """(verdict in words, the entry if one pays)."""
    subject = SUBJECTS[kernel]
    case = model.case([1], [1])
    with tuning.forced({}):
        heuristics = subject.tiling(case)
    start = {name: getattr(heuristics, name) for name in tuning.KERNELS[kernel].knobs}
    size = (
        f"{model.heads // model.kv_heads} heads a KV head of {model.head_dim}, {model.kv_dtype} pages of {model.page}"
    )
    with tqdm(desc=f"{kernel}, {size}", unit="candidate") as bar:
        timer = Timer(kernel, model, bar)
        timer.seconds(start)
        for config in candidates(kernel, model, start, timer):
            timer.seconds(config)
        best = min((dict(key) for key in timer.found), key=timer.seconds)
        for config in (start, best):  # at the same time of day
            timer.again(config)
        bar.set_postfix_str("")
    reasons = collections.Counter(value for value in timer.found.values() if isinstance(value, str))
    num_measured = len(timer.found) - sum(reasons.values())
    if not num_measured:
        return f"{kernel}, {size}: no candidate is left: {dict(reasons)}", None
    before, after = timer.seconds(start), timer.seconds(best)
    said = (
        f"{kernel}, {size}: {num_measured} measured, {sum(reasons.values())} dropped; {after * 1e6:.1f} us, heuristics "
    )
    said += "fail" if math.isinf(before) else f"{before * 1e6:.1f} us"
    if after > before * (1 - _GAIN.value):
        return f"{said}: heuristics stay", None
    measured = {
        "us": timer.microseconds(best),
        "heuristics": start,
        "heuristics_us": timer.microseconds(start),
        "candidates": num_measured,
        "dropped": dict(reasons),
        "on": provenance(),
    }
    entry = {"kernel": kernel, "shape": case.shape_class._asdict(), "config": best, "measured": measured}
    return f"{said}: {', '.join(f'{name} {value}' for name, value in best.items())}", entry


def provenance() -> dict[str, str]:
    """Machine, versions and command."""
    versions = {}
    for name in ("jax", "jaxlib", "triton", "jax-triton"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=pathlib.Path(__file__).parent, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {"machine": machine.describe(), **versions, "commit": commit, "command": machine.command()}


def merged(path: pathlib.Path, device: str, tuned: set[tuple], entries: list[dict]) -> str:
    """The file's new text: its old entries but those of (kernel, shape class) tuned now, and the new ones."""
    kept = []
    if path.exists():
        try:
            tuning.parse(path.read_text(encoding="utf-8"), device)
        except ValueError as error:
            raise SystemExit(f"{path} is wrong, move it away first: {error}") from error
        old = json.loads(path.read_text(encoding="utf-8"))["tuned"]
        kept = [e for e in old if (e["kernel"], tuning.ShapeClass(**e["shape"])) not in tuned]
    text = json.dumps({"device": device, "tuned": kept + entries}, indent=1) + "\n"
    tuning.parse(text, device)
    return text


def models() -> Iterator[Model]:
    """All shape classes, each once."""
    seen = set()
    for heads, dim, page, kv in itertools.product(
        _HEADS.value, _DIMS.value, _PAGES.value, _KV_DTYPES.value or [_DTYPE.value]
    ):
        total, _, kv_heads = heads.partition("/")
        model = Model(int(total), int(kv_heads or total), int(dim), int(page), _DTYPE.value, kv)
        if model.case([1], [1]).shape_class not in seen:
            seen.add(model.case([1], [1]).shape_class)
            yield model


def kernels(model: Model) -> list[str]:
    """The named ones, which must be able to serve, or those of the backend that serves."""
    unknown = [name for name in _KERNELS.value if name not in SUBJECTS]
    if unknown:
        raise app.UsageError(f"--kernels: must be of {', '.join(SUBJECTS)}; got {', '.join(unknown)}")
    case = model.case([1, 2], [1, 2])
    try:
        for name in _KERNELS.value:
            dispatch.pick("paged_attention", BACKENDS, SUBJECTS[name].backend, case)
        chosen = dispatch.pick("paged_attention", BACKENDS, "auto", case).name
    except NotImplementedError as reason:
        raise SystemExit(str(reason)) from reason
    return _KERNELS.value or [name for name, subject in SUBJECTS.items() if subject.backend == chosen]


def main(argv: list[str]) -> None:
    del argv
    device = tuning.device_name(current_hardware())
    path = pathlib.Path(_OUTPUT.value or cache_folder("tuned") / tuning.file_name(device))
    merged(path, device, set(), [])  # before hours of work
    print(f"{device}: {path}")
    tuned, entries = set(), []
    for model in models():
        for kernel in kernels(model):
            verdict, entry = tune(kernel, model)
            print(verdict, flush=True)
            tuned.add((kernel, model.case([1], [1]).shape_class))
            entries += [entry] if entry else []
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(merged(path, device, tuned, entries), encoding="utf-8")  # what is known, should it end here
    print(f"{len(entries)} of {len(tuned)} shape classes gain {_GAIN.value:.0%} or more", file=sys.stderr)


if __name__ == "__main__":
    app.run(main)
