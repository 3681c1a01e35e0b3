#!/usr/bin/env python3
"""Compiles what an engine runs on TPUs, to machine code, on a machine without one: what the compiler refuses, what it copies.

  .venv/bin/pip install "libtpu==0.0.50.*"    # the one that JAX's own `tpu` extra asks for
  .venv/bin/python scripts/compile_kernels.py --target=v5e,v6e

Interpreted kernels know no tiles and no memory limits; the compiler does. Two kinds of cases:

- decode, mixed: a step's cache operations as the engine has them, in one program with the cache donated: copy_pages, then
  for every layer of a scan kv_update and paged_attention, the cache in the carry. Backends are chosen as on the chip.
- engine: the engine's own programs around a model of SmolLM2's shape, for the first chip.

One line a case: whether it compiled, the VMEM of its kernels, and the temporary HBM, which has to be far below the pool's
bytes: else the pool is copied. Exits with 1 if a case that should compile did not, copies the pool, does not update it in
place, or takes more memory for it than its elements need. A case that no TPU kernel serves is refused with the reason.
"""

# ruff: noqa: E402  JAX is imported once the environment is as libtpu needs it

from __future__ import annotations

import functools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from absl import app, flags

_TARGET = flags.DEFINE_list("target", ["v5e", "v6e"], "chips")
_ROWS = flags.DEFINE_integer("rows", 64, "sequences", lower_bound=1)
_CONTEXT = flags.DEFINE_integer("context", 4096, "most tokens of a sequence", lower_bound=1)
_DTYPES = flags.DEFINE_list("dtypes", ["bfloat16", "float32"], "of queries, and of pages where kv_dtypes does not say")
_KV_DTYPES = flags.DEFINE_list("kv_dtypes", [], "of pages")
_TOKENS = flags.DEFINE_integer("tokens", 2048, "tokens of a mixed batch", lower_bound=2)
_PAGE = flags.DEFINE_list("page_sizes", ["16"], "slots a page")
_ONLY = flags.DEFINE_string("only", "", "a part of the case's name")
_ALL = flags.DEFINE_bool(
    "all", False, "every kind of batch in every shape, and all of the engine's programs on every chip"
)
_ERRORS = flags.DEFINE_bool("errors", False, "whether to print the compiler's whole message")

# What libtpu would otherwise ask the machine for; set before JAX is imported.
os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.experimental import topologies
from pagedjax_kernels import KVCache, copy_pages, init_cache, kv_update, paged_attention

from pagedjax.models import Llama, ModelSpec
from pagedjax.runner.buckets import Buckets
from pagedjax.runner.programs import Programs
from pagedjax.runner.state import init_state

LAYERS = 2
POOL_BYTES = 2**31
"""So large that nothing else in a step comes near it. Nothing is allocated."""
COPIED = 1 / 4
"""Temporary memory above this part of the pool can only be a copy."""
PADDED = 1.05
"""Of a pool's elements in bytes: what it may take at most."""


class Shape(NamedTuple):
    """heads: (query heads, KV heads). whole: mixed batches, and windows, soft caps and sinks, too."""

    heads: tuple[int, int]
    head_dim: int
    whole: bool = False


# KV heads decide how XLA lays the pages out, together with the head dim: 1, 2, 3, 4, 5, 8, 16 and 32 of 64, 128 and 256.
SHAPES = (
    Shape((9, 3), 64, whole=True),  # SmolLM2 135M
    Shape((32, 8), 64, whole=True),  # Llama 3.2 1B
    *(Shape((2 * k, k), 64) for k in (1, 2, 4, 5, 16, 32)),
    Shape((32, 8), 128, whole=True),  # Llama 3 8B
    Shape((12, 2), 128, whole=True),
    *(Shape((2 * k, k), 128) for k in (1, 3, 4, 5, 16, 32)),
    Shape((4, 1), 256, whole=True),  # Gemma 3 270M
    Shape((8, 4), 256, whole=True),  # Gemma 3 4B
    *(Shape((2 * k, k), 256) for k in (2, 3, 5, 8, 16, 32)),
    Shape((8, 2), 80),
)
OPTIONS = {"plain": {}, "window+cap+sinks": {"soft_cap": 30.0, "window": True, "sinks": True}}


class Program(NamedTuple):
    """compile: () -> the compiled program. cache: its pages, abstract. donated: whether it updates them."""

    compile: Callable[[], Any]
    cache: KVCache
    donated: bool = True


def size_of(cache: KVCache) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))


def step(shape: Shape, page: int, dtype: str, kv_dtype: str, decode: bool, options: dict) -> Program:
    """A step's cache operations. Queries of a layer depend on the output of the one before."""
    rows, per_row, (heads, kv_heads), dim = _ROWS.value, -(-_CONTEXT.value // page), shape.heads, shape.head_dim
    tokens = rows if decode else max(_TOKENS.value, rows)
    i32, like = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32), jax.ShapeDtypeStruct
    allocate = functools.partial(init_cache, page_size=page, num_kv_heads=kv_heads, head_dim=dim, dtype=kv_dtype)
    one = size_of(jax.eval_shape(functools.partial(allocate, LAYERS, 1)))
    cache = jax.eval_shape(functools.partial(allocate, LAYERS, POOL_BYTES // one + 1))
    window = i32(()) if options.get("window") else None
    sinks = like((heads,), jnp.float32) if options.get("sinks") else None
    q, kv = like((tokens, heads, dim), dtype), like((tokens, kv_heads, dim), dtype)
    batch = (i32((rows, per_row)), i32((rows,)), i32((rows + 1,)))

    def run(cache, q, k, v, slots, src, dst, batch, window, sinks):
        cache = copy_pages(cache, src, dst)
        more = {"window": window, "sinks": sinks, "soft_cap": options.get("soft_cap")}

        def layer(carry, index):
            cache, q = carry
            cache = kv_update(cache, k + q[:, : k.shape[1]], v, index, slots)
            backend = "pallas_tpu"  # by name: it serves or says why not
            out = paged_attention(q, cache, index, *batch, max_q_len=1 if decode else None, backend=backend, **more)
            return (cache, out), None

        return lax.scan(layer, (cache, q), jnp.arange(LAYERS, dtype=jnp.int32))[0]

    arguments = (cache, q, kv, kv, i32((tokens,)), i32((rows,)), i32((rows,)), batch, window, sinks)
    return Program(lambda: jax.jit(run, donate_argnums=0).lower(*arguments).compile(), cache)


def engine_programs(page: int, dtype: str, kv_dtype: str) -> dict[str, Program]:
    """What touches the pages among the engine's programs, around a model of SmolLM2's shape with few tokens."""
    spec = ModelSpec(
        architecture="LlamaForCausalLM",
        num_layers=30,
        hidden_size=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=1024,
        max_position_embeddings=2048,
    )
    graph, params = nnx.split(nnx.eval_shape(lambda: Llama.random(spec, jnp.dtype(dtype))))
    allocate = functools.partial(init_state, spec, page_size=page, max_rows=64, max_len=2048, secret=(1, 2))
    pages = POOL_BYTES // (
        spec.num_layers * page * 2 * spec.num_kv_heads * spec.head_dim * jnp.dtype(kv_dtype).itemsize
    )
    state = jax.eval_shape(lambda: allocate(num_pages=pages, cache_dtype=jnp.dtype(kv_dtype)))
    buckets = Buckets((64,), ((512, 64),))
    programs = Programs(graph, params, state, spec, buckets=buckets, buffer_steps=8, backend="auto", swaps=True)
    keys = [("decode", 64), ("mixed", 512, 64), ("fork",), ("swap_in",), ("swap_out",), ("compact",)]
    return {key[0]: Program(functools.partial(programs.get, *key), state.cache, key[0] != "swap_out") for key in keys}


def cases(engine: bool) -> Iterator[tuple[str, Callable[[], Program]]]:
    """(name, what makes the program) of every case."""
    for page in map(int, _PAGE.value):
        for dtype in _DTYPES.value:
            for kv_dtype in _KV_DTYPES.value or [dtype]:
                of = dtype if dtype == kv_dtype else f"{dtype} over {kv_dtype}"
                for shape in SHAPES:
                    heads = f"{shape.heads[0]}/{shape.heads[1]} heads of {shape.head_dim}"
                    for option, options in OPTIONS.items():
                        for kind in ("decode", "mixed"):
                            if not (shape.whole or _ALL.value or (kind == "decode" and not options)):
                                continue
                            make = functools.partial(step, shape, page, dtype, kv_dtype, kind == "decode", options)
                            yield f"{heads}, page {page}, {of}, {kind}, {option}", make
                names = ("decode", "mixed", "fork", "swap_in", "swap_out", "compact")
                for name in names if _ALL.value else ("decode", "swap_in", "compact") if engine else ():
                    make = lambda name=name, a=(page, dtype, kv_dtype): engine_programs(*a)[name]  # noqa: E731
                    yield f"engine's {name}, page {page}, {of}", make


def main(argv: list[str]) -> None:
    del argv
    print(f"JAX {jax.__version__}; {_ROWS.value} rows of {_CONTEXT.value} tokens, {LAYERS} layers")
    print(f"{'case':68s} | target | compiled | VMEM MiB | temporary MiB | pool MiB | seconds")
    failed = 0
    for number, target in enumerate(_TARGET.value):
        # The chip as the default device: everything that looks at the hardware sees it, and programs are compiled for it.
        with jax.default_device(topologies.get_topology_desc(platform="tpu", topology_name=f"{target}:2x2").devices[0]):
            for name, make in cases(engine=number == 0):
                if _ONLY.value in name:
                    failed += not report(name, target, make)
    sys.exit(1 if failed else 0)


def vmem(compiled: Any) -> int:
    """VMEM bytes of the largest kernel."""
    sizes = [0]
    for line in compiled.as_text().splitlines():
        if "tpu_custom_call" in line:
            used = re.search(r'"used_scoped_memory_configs":\[(.*?)\]', line)
            sizes += [int(n) for n in re.findall(r'"size":"(\d+)"', used.group(1))] if used else []
    return max(sizes)


def verdict(memory: Any, program: Program) -> str:
    pool = size_of(program.cache)
    if memory.argument_size_in_bytes > PADDED * pool + 2**28:  # weights, queries and metadata are the rest
        return "PADS"
    if program.donated and memory.alias_size_in_bytes < pool:
        return "NOT IN PLACE"
    return "COPIES" if memory.temp_size_in_bytes > COPIED * pool else "yes"


def report(name: str, target: str, make: Callable[[], Program]) -> bool:
    started = time.perf_counter()
    try:
        program = make()
        compiled = program.compile()
    except NotImplementedError as e:
        print(f"{name:68s} | {target:6s} | refused: {e}", flush=True)
        return True
    except Exception as e:
        message = str(e) if _ERRORS.value else " ".join(str(e).split())[:300]
        print(f"{name:68s} | {target:6s} | NO: {message}", flush=True)
        return False
    memory = compiled.memory_analysis()
    found = verdict(memory, program)
    sizes = ((vmem(compiled), 8), (memory.temp_size_in_bytes, 13), (size_of(program.cache), 8))
    mib = " | ".join(f"{n / 2**20:{w}.1f}" for n, w in sizes)
    print(f"{name:68s} | {target:6s} | {found:8s} | {mib} | {time.perf_counter() - started:.1f}", flush=True)
    return found == "yes"


if __name__ == "__main__":
    app.run(main)
