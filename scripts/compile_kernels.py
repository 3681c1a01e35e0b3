#!/usr/bin/env python3
"""Compiles the TPU kernels to machine code on a machine without a TPU: what the compiler refuses, and what it copies.

  .venv/bin/pip install "libtpu==0.0.50.*"    # the one that JAX's own `tpu` extra asks for
  .venv/bin/python scripts/compile_kernels.py --target=v5e,v6e

Interpreted kernels know no tiles and no memory limits; the compiler does. One line a case: whether it compiled, the
VMEM of its kernels, and the temporary HBM, which has to be far below the pool's bytes: else the whole pool is copied
in every call. Exits with 1 if a case that should compile did not, or copies the pool.
"""

# ruff: noqa: E402  JAX is imported once the environment is as libtpu needs it

from __future__ import annotations

import functools
import os
import re
import sys
import time
from typing import NamedTuple

from absl import app, flags

_TARGET = flags.DEFINE_list("target", ["v5e", "v6e"], "chips")
_ROWS = flags.DEFINE_integer("rows", 64, "sequences", lower_bound=1)
_CONTEXT = flags.DEFINE_integer("context", 4096, "most tokens of a sequence", lower_bound=1)
_DTYPES = flags.DEFINE_list("dtypes", ["bfloat16", "float32"], "of queries and pages")
_TOKENS = flags.DEFINE_integer("tokens", 2048, "tokens of a mixed batch", lower_bound=2)
_PAGE = flags.DEFINE_list("page_sizes", ["16"], "slots a page")
_ONLY = flags.DEFINE_string("only", "", "a part of the case's name")
_ERRORS = flags.DEFINE_bool("errors", False, "whether to print the compiler's whole message")

# What libtpu would otherwise ask the machine for; set before JAX is imported.
os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from pagedjax_kernels import KVCache
from pagedjax_kernels.paged_attention.api import _checked
from pagedjax_kernels.paged_attention.pallas_tpu import paged_attention_pallas_tpu
from pagedjax_kernels.paged_attention.pallas_tpu_limits import unservable

LAYERS = 2


class Shape(NamedTuple):
    """heads: (query heads, KV heads). stored: "pairs" keeps K and V of a head in one row of 128, "rows" apart."""

    name: str
    heads: tuple[int, int]
    head_dim: int
    stored: str = "rows"


SHAPES = (
    Shape("SmolLM2 135M", (9, 3), 64, "pairs"),
    Shape("D 64, group 4", (32, 8), 64, "pairs"),
    Shape("D 64, MHA", (12, 12), 64, "pairs"),
    Shape("D 64, 1 KV head", (4, 1), 64, "pairs"),
    Shape("Llama 3 8B", (32, 8), 128),
    Shape("Qwen3 0.6B", (16, 8), 128),
    Shape("2 KV heads", (12, 2), 128),
    Shape("1 KV head", (8, 1), 128),
    Shape("3 KV heads", (9, 3), 128),
    Shape("MHA", (32, 32), 128),
    Shape("Gemma 3 270M", (4, 1), 256),
    Shape("Gemma 3 4B", (8, 4), 256),
)
OPTIONS = {"plain": {}, "window+cap+sinks": {"soft_cap": 30.0, "window": True, "sinks": True}}


def program(shape: Shape, page: int, dtype: str, decode: bool, options: dict):
    """(function, abstract arguments, pool bytes) of one attention call."""
    rows, per_row = _ROWS.value, -(-_CONTEXT.value // page)
    tokens = rows if decode else max(_TOKENS.value, rows)
    (heads, kv_heads), dim = shape.heads, shape.head_dim
    logical = (LAYERS, rows * per_row + 1, page, 2 * kv_heads, dim)
    resting = (*logical[:3], kv_heads, 2 * dim) if shape.stored == "pairs" else logical
    i32, like = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32), jax.ShapeDtypeStruct
    cache = KVCache(like(logical, dtype))
    window = i32(()) if options.get("window") else None
    sinks = like((heads,), jnp.float32) if options.get("sinks") else None
    q = like((tokens, heads, dim), dtype)
    batch = (i32((rows, per_row)), i32((rows,)), i32((rows + 1,)))
    case = _checked(q, cache, *batch, None, options.get("soft_cap"), window, sinks, 1 if decode else None)
    reason = unservable(case)
    if reason:
        raise NotImplementedError(reason)

    def call(q, pages, layer, table, lens, cu, window, sinks):
        cache = KVCache(pages.reshape(logical))
        return paged_attention_pallas_tpu(q, cache, layer, table, lens, cu, window, sinks, case)

    pool = like(resting, dtype)
    return call, (q, pool, i32(()), *batch, window, sinks), pool.size * pool.dtype.itemsize


def compile_one(device, function, arguments) -> tuple[int, int]:
    """(VMEM bytes of the largest kernel, temporary HBM bytes)."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    compiled = jax.jit(function).lower(*arguments).compile()
    sizes = [0]
    for line in compiled.as_text().splitlines():
        if "tpu_custom_call" in line:
            used = re.search(r'"used_scoped_memory_configs":\[(.*?)\]', line)
            sizes += [int(n) for n in re.findall(r'"size":"(\d+)"', used.group(1))] if used else []
    return max(sizes), compiled.memory_analysis().temp_size_in_bytes


def main(argv: list[str]) -> None:
    del argv
    print(f"JAX {jax.__version__}; {_ROWS.value} rows of {_CONTEXT.value} tokens, {LAYERS} layers")
    print(f"{'case':68s} | target | compiled | VMEM MiB | temporary MiB | pool MiB | seconds")
    failed = 0
    for target in _TARGET.value:
        device = topologies.get_topology_desc(platform="tpu", topology_name=f"{target}:2x2").devices[0]
        for page in map(int, _PAGE.value):
            for shape in SHAPES:
                for dtype in _DTYPES.value:
                    for kind in ("decode", "mixed"):
                        for option, options in OPTIONS.items():
                            heads = f"{shape.heads[0]}/{shape.heads[1]} heads of {shape.head_dim}"
                            name = f"{shape.name}, {heads}, page {page}, {dtype}, {kind}, {option}"
                            if _ONLY.value not in name:
                                continue
                            failed += not report(name, target, device, shape, page, dtype, kind == "decode", options)
    sys.exit(1 if failed else 0)


def report(name, target, device, shape, page, dtype, decode, options) -> bool:
    started = time.perf_counter()
    try:
        function, arguments, pool = program(shape, page, dtype, decode, options)
        vmem, temporary = compile_one(device, function, arguments)
    except NotImplementedError as e:
        print(f"{name:68s} | {target:6s} | refused: {e}", flush=True)
        return True
    except Exception as e:
        message = str(e) if _ERRORS.value else " ".join(str(e).split())[:300]
        print(f"{name:68s} | {target:6s} | NO: {message}", flush=True)
        return False
    copied = temporary > pool // 2
    verdict = "COPIES" if copied else "yes"
    mib = " | ".join(f"{n / 2**20:{w}.1f}" for n, w in ((vmem, 8), (temporary, 13), (pool, 8)))
    print(f"{name:68s} | {target:6s} | {verdict:8s} | {mib} | {time.perf_counter() - started:.1f}", flush=True)
    return not copied


if __name__ == "__main__":
    app.run(main)
