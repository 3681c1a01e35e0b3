#!/usr/bin/env python3
"""Decode attention of each backend: is it right, and how much of the memory's bandwidth does it get?

  .venv/bin/python scripts/bench_kernels.py --output=benchmarks/kernels.json                          # on a GPU or TPU
  JAX_PLATFORMS=cpu .venv/bin/python scripts/bench_kernels.py --backends=native_cpu,xla --batches=1,8 \\
    --contexts=128,1024 --heads=9/3 --head_dim=64 --cold_mib=64 --copy_mib=64

First each backend is held against `reference` on decode rows and on a mixed batch; one that is off ends the run with an
error. Then it decodes: rows of `context` tokens each, pages scattered over the pool. Bandwidth is the bytes of the keys
and values seen, over the time of one call; what a plain addition gets, reading and writing, is measured in the same run
and is what `share` refers to. Layers are taken in turns, so that no cache holds what is read.
"""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import machine
import numpy as np
from absl import app, flags
from jax import lax
from pagedjax_kernels import KVCache, init_cache, paged_attention

_BACKENDS = flags.DEFINE_list("backends", ["auto"], "attention backends")
_BATCHES = flags.DEFINE_list("batches", ["1", "8", "64", "256"], "numbers of rows")
_CONTEXTS = flags.DEFINE_list("contexts", ["128", "1024", "4096", "32768"], "tokens a row")
_HEADS = flags.DEFINE_list("heads", ["32/32", "32/8", "64/8"], "query heads/KV heads")
_DIM = flags.DEFINE_integer("head_dim", 128, "head dim", lower_bound=1)
_PAGES = flags.DEFINE_list("page_sizes", ["16", "64"], "tokens a page")
_DTYPE = flags.DEFINE_string("dtype", "bfloat16", "of the queries; and of the pages, unless --kv_dtype")
_KV_DTYPE = flags.DEFINE_string("kv_dtype", "", "of the pages, also int8 or float8_e4m3fn; empty: as --dtype")
_LIMIT = flags.DEFINE_float("max_gib", 16, "shapes whose pages take more are left out")
_COLD = flags.DEFINE_integer("cold_mib", 512, "as many layers as hold this much, several times the device's cache")
_COPY = flags.DEFINE_integer("copy_mib", 1024, "size of the array whose addition gives the bandwidth", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 16, "calls in one compiled loop", lower_bound=1)
_REPEAT = flags.DEFINE_integer("repeat", 5, "timings of each loop; the best counts", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", "", "where to write the figures as JSON")

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}


class Shape(NamedTuple):
    """Attributes: query and KV heads, tokens a page, rows, tokens a row."""

    heads: int
    kv_heads: int
    page: int
    batch: int
    context: int

    @property
    def pages(self) -> int:
        """Pages of one row."""
        return -(-self.context // self.page)


def best_seconds(run: Callable[[], jax.Array]) -> float:
    """The fastest of the repeats; the first call, which compiles, is not one."""
    run().block_until_ready()
    best = float("inf")
    for _ in range(_REPEAT.value):
        started = time.perf_counter()
        run().block_until_ready()
        best = min(best, time.perf_counter() - started)
    return best


def copy_bandwidth() -> float:
    """GB/s of x + 1, read and written in place: new memory would have to be mapped first."""
    x = jnp.zeros(_COPY.value << 18, jnp.float32)
    add = jax.jit(lambda x: lax.fori_loop(0, _STEPS.value, lambda _, x: x + 1, x))
    return 2 * x.nbytes * _STEPS.value / best_seconds(lambda: add(x)) / 1e9


@functools.partial(jax.jit, donate_argnums=0)
def filled(cache: KVCache) -> KVCache:
    """The cache full of numbers in [-1, 1] (times 1/100 of an int8), without random bits that would take more memory."""
    shape = cache.kv_pages.shape
    number = sum(
        jnp.float32(step) * lax.broadcasted_iota(jnp.int32, shape, axis).astype(jnp.float32)
        for axis, step in enumerate((0.7, 1.3, 0.37, 2.1, 0.9))
    )
    wave = jnp.sin(number) * (100 if cache.dtype == jnp.int8 else 1)
    pages = wave.astype(cache.dtype)
    if cache.kv_pages.dtype != cache.dtype:
        pages = lax.bitcast_convert_type(pages, cache.kv_pages.dtype)
    scales = None if cache.scales is None else jnp.full_like(cache.scales, 0.01 if cache.dtype == jnp.int8 else 1)
    return KVCache(pages, scales)


def make(shape: Shape, num_layers: int) -> tuple[KVCache, jax.Array]:
    """A pool in which every row owns its pages, scattered; page 0 is nobody's."""
    N = shape.batch * shape.pages + 1
    dtype = _KV_DTYPE.value or _DTYPE.value
    cache = filled(init_cache(num_layers, N, shape.page, shape.kv_heads, _DIM.value, dtype))
    table = np.random.default_rng(0).permutation(np.arange(1, N, dtype=np.int32))
    return cache, jnp.asarray(table.reshape(shape.batch, shape.pages))


def error(backend: str, shape: Shape, q_lens: list[int], kv_lens: list[int]) -> float:
    """The largest difference from `reference`."""
    cache, table = make(shape, 2)
    cu = jnp.asarray(np.concatenate([[0], np.cumsum(q_lens)]), jnp.int32)
    q = jax.random.normal(jax.random.key(0), (sum(q_lens), shape.heads, _DIM.value), jnp.dtype(_DTYPE.value))
    args = (q, cache, 1, table, jnp.asarray(kv_lens, jnp.int32), cu)
    limit = 1 if max(q_lens) == 1 else None
    got, want = (
        np.asarray(jax.jit(lambda *a, b=b: paged_attention(*a, max_q_len=limit, backend=b))(*args)).astype(np.float32)
        for b in (backend, "reference")
    )
    return float(np.max(np.abs(got - want))) if np.isfinite(got).all() else float("inf")


def check(backend: str, heads: int, kv_heads: int, page: int) -> dict[str, float]:
    """Errors on decode and mixed batches (if it serves those); too large a one ends the program."""
    shape = Shape(heads, kv_heads, page, 4, 700)
    errors = {"decode": error(backend, shape, [1, 1, 1, 1], [700, 1, page, page + 1])}
    try:
        errors["mixed"] = error(backend, shape, [1, 130, 7, 1], [600, 130, 300, 5])
    except NotImplementedError as reason:
        print(reason, file=sys.stderr)
    for kind, size in errors.items():
        if size > TOLERANCE[_DTYPE.value]:
            raise SystemExit(
                f"{backend} is wrong: {kind} of {heads}/{kv_heads} heads, page {page}: off by {size:.2g}, "
                f"allowed is {TOLERANCE[_DTYPE.value]}"
            )
    return errors


def layer_bytes(shape: Shape) -> int:
    """Keys and values that one call reads: of tokens, not of pages."""
    itemsize = jnp.dtype(_KV_DTYPE.value or _DTYPE.value).itemsize
    scale = 4 if (_KV_DTYPE.value or _DTYPE.value) in ("int8", "float8_e4m3fn") else 0
    return shape.batch * shape.context * 2 * shape.kv_heads * (_DIM.value * itemsize + scale)


def decode_seconds(backend: str, shape: Shape, num_layers: int) -> float:
    """One call, of many in a compiled loop."""
    cache, table = make(shape, num_layers)
    lens, cu = jnp.full(shape.batch, shape.context, jnp.int32), jnp.arange(shape.batch + 1, dtype=jnp.int32)
    q = jax.random.normal(jax.random.key(0), (shape.batch, shape.heads, _DIM.value), jnp.dtype(_DTYPE.value))
    steps = max(_STEPS.value, num_layers)

    @jax.jit
    def run(q, cache):
        def again(i, q):
            return paged_attention(q, cache, i % num_layers, table, lens, cu, max_q_len=1, backend=backend)

        return lax.fori_loop(0, steps, again, q)

    return best_seconds(lambda: run(q, cache)) / steps


def measure(backend: str, shape: Shape, copy: float) -> dict | None:
    """The figures of one shape; None where it does not fit."""
    size = layer_bytes(shape)
    num_layers = max(1, -(-(_COLD.value << 20) // size))
    num_layers = min(num_layers, 1024)
    if num_layers * size > _LIMIT.value * 2**30:
        return None
    seconds = decode_seconds(backend, shape, num_layers)
    rate = size / seconds / 1e9
    return {"backend": backend, **shape._asdict(), "us": seconds * 1e6, "gb_per_s": rate, "share": rate / copy}


def checked(backend: str, heads: int, kv_heads: int, page: int) -> dict:
    """`check` with what it was about; a backend that cannot serve ends the program with its reason."""
    try:
        errors = check(backend, heads, kv_heads, page)
    except NotImplementedError as reason:
        raise SystemExit(str(reason)) from reason
    return {"backend": backend, "heads": heads, "kv_heads": kv_heads, "page": page, **errors}


def main(argv: list[str]) -> None:
    del argv
    copy = copy_bandwidth()
    print(f"{jax.devices()[0].device_kind}: an addition reads and writes {copy:.1f} GB/s")
    checks, results = [], []
    print(f"{'backend':11s}{'heads':>8s}{'page':>6s}{'rows':>6s}{'context':>9s}{'us':>11s}{'GB/s':>9s}{'share':>8s}")
    for backend, text, page in itertools.product(_BACKENDS.value, _HEADS.value, map(int, _PAGES.value)):
        heads, kv_heads = (int(n) for n in text.split("/"))
        checks.append(checked(backend, heads, kv_heads, page))
        for batch, context in itertools.product(map(int, _BATCHES.value), map(int, _CONTEXTS.value)):
            line = f"{backend:11s}{text:>8s}{page:6d}{batch:6d}{context:9d}"
            found = measure(backend, Shape(heads, kv_heads, page, batch, context), copy)
            if found is None:
                print(f"{line}   more than {_LIMIT.value:g} GiB", file=sys.stderr)
                continue
            results.append(found)
            print(f"{line}{found['us']:11.1f}{found['gb_per_s']:9.1f}{found['share']:8.1%}", flush=True)
    if _OUTPUT.value:
        write(pathlib.Path(_OUTPUT.value), copy, checks, results)


def write(path: pathlib.Path, copy: float, checks: list[dict], results: list[dict]) -> None:
    """The report as JSON."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=pathlib.Path(__file__).parent, capture_output=True, text=True, check=False
    ).stdout.strip()
    report = {
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
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
