"""The Triton kernels compiled to machine code, which needs no GPU: what they ask of one, and that JAX takes them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pathlib
import re
import subprocess
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pagedjax_kernels import KVCache, dispatch, paged_attention, triton_call
from pagedjax_kernels.copy_pages import triton as copy_backend
from pagedjax_kernels.hardware import Hardware
from pagedjax_kernels.paged_attention import api
from pagedjax_kernels.paged_attention import triton as backend

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (extra pagedjax[triton])"
)

ROWS, MAX_PAGES, KV_HEADS = 8, 64, 2
TYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "int8": "i8",
    "float8_e4m3fn": "fp8e4nv",
    "int32": "i32",
}
SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}  # bytes that a program may have


class Shape(NamedTuple):
    """Attributes:
    q_dtype, kv_dtype, head_dim, group: what tiles follow from.
    features: window, soft cap and sinks, all or none.
    page: tokens a page; with 16 a tile of keys is several pages.
    """

    q_dtype: str
    kv_dtype: str
    head_dim: int
    group: int
    features: bool = True
    page: int = 16


SHAPES = [
    Shape("bfloat16", "bfloat16", 64, 1),
    Shape("bfloat16", "bfloat16", 80, 1),
    Shape("bfloat16", "bfloat16", 128, 4, False),
    Shape("bfloat16", "bfloat16", 128, 4, True, 64),
    Shape("bfloat16", "bfloat16", 64, 3, True, 7),
    Shape("float16", "float16", 128, 8),
    Shape("bfloat16", "bfloat16", 128, 128),
    Shape("bfloat16", "bfloat16", 256, 4),
    Shape("bfloat16", "bfloat16", 256, 64),
    Shape("bfloat16", "int8", 128, 4),
    Shape("bfloat16", "int8", 128, 4, True, 64),
    Shape("bfloat16", "int8", 128, 32),
    Shape("float16", "int8", 256, 4),
    Shape("bfloat16", "int8", 256, 64),
    Shape("bfloat16", "float8_e4m3fn", 128, 4),
    Shape("bfloat16", "float8_e4m3fn", 256, 4),
    Shape("float32", "float32", 64, 3),
    Shape("float32", "float32", 128, 4),
    Shape("float32", "float32", 256, 4),
    Shape("float32", "float32", 256, 32),
    Shape("float32", "int8", 128, 4),
    Shape("float32", "bfloat16", 256, 4),
]


def arguments(shape: Shape, num_tokens: int) -> tuple[tuple, dict]:
    """Shapes of a call of paged_attention: (positional, keyword)."""
    of = jax.ShapeDtypeStruct
    padded = -(-shape.head_dim // 64) * 64 if shape.head_dim != 80 else 128
    pages = (2, 300, shape.page, 2 * KV_HEADS, padded)
    quantized = shape.kv_dtype in ("int8", "float8_e4m3fn")
    cache = KVCache(of(pages, jnp.dtype(shape.kv_dtype)), of(pages[:-1], jnp.float32) if quantized else None)
    heads = KV_HEADS * shape.group
    q = of((num_tokens, heads, shape.head_dim), jnp.dtype(shape.q_dtype))
    ints = [of(s, jnp.int32) for s in ((), (ROWS, MAX_PAGES), (ROWS,), (ROWS + 1,))]
    features = {"window": of((), jnp.int32), "sinks": of((heads,), jnp.float32)} if shape.features else {}
    return (q, cache, *ints), features


def launches(shape: Shape, monkeypatch) -> list[tuple[str, list[str], dict]]:
    """What a call launches: (kernel, dtypes of its arrays, options)."""
    found = []

    def record(kernel, *args, out_shape, grid, zeroed=False, **options):
        outs = out_shape if isinstance(out_shape, list) else [out_shape]
        found.append((kernel, [a.dtype.name for a in (*args, *outs)], options))
        empty = [jnp.zeros(s.shape, s.dtype) for s in outs]
        return empty if isinstance(out_shape, list) else empty[0]

    args, features = arguments(shape, 512)
    soft_cap = 20.0 if shape.features else None
    window, sinks = features.get("window"), features.get("sinks")
    _, _, _, table, lens, cu = args
    case = api._checked(args[0], args[1], table, lens, cu, None, soft_cap, window, sinks, None)
    monkeypatch.setattr(backend, "launch", record)
    jax.eval_shape(lambda *a: backend.paged_attention_triton(*a, case), *args, window, sinks)
    return found


def compiled(capability: int, kernel: str, dtypes: list[str], options: dict, op: str = "paged_attention"):
    """The kernel as jax-triton compiles it: every array starts at a multiple of 16 bytes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(f"pagedjax_kernels.{op}.triton_kernels"), kernel)
    names = ("num_warps", "num_stages")
    fixed = {k: v for k, v in options.items() if k not in names}
    signature = {n: "*" + TYPES[d] for n, d in zip(function.arg_names, dtypes, strict=False)}
    signature |= dict.fromkeys(fixed, "constexpr")
    values = {(function.arg_names.index(k),): v for k, v in fixed.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(dtypes))}
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(pathlib.Path(__file__).resolve().parents[2] / ".cache" / "triton")
        return triton.compile(
            ASTSource(function, signature, values, aligned),
            target=GPUTarget("cuda", capability, 32),
            options={k: options[k] for k in names if k in options},
        )


def resources(cubin: bytes, folder: pathlib.Path) -> tuple[int, int]:
    """(registers a thread, bytes of the stack, which is where spilled registers go)."""
    import triton

    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    said = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found, said
    return int(found[1]), int(found[2])


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(str(v) for v in s))
def test_nothing_spills_and_shared_memory_suffices(shape, capability, monkeypatch, tmp_path):
    if shape.kv_dtype == "float8_e4m3fn" and capability < 89:
        pytest.skip("float8 pages are refused below compute capability 8.9")
    found = launches(shape, monkeypatch)
    assert [kernel for kernel, _, _ in found] == ["prefill_kernel", "decode_kernel", "reduce_kernel"]
    for kernel, dtypes, options in found:
        result = compiled(capability, kernel, dtypes, options)
        registers, stack = resources(result.asm["cubin"], tmp_path)
        print(
            f"{capability} {kernel} {options['num_warps']} warps: {registers} registers, {stack} bytes spilled, ",
            end="",
        )
        print(f"{result.metadata.shared} bytes shared")
        assert stack == 0, f"{kernel}: {stack} bytes a thread are spilled"
        # Decode wants two programs on an SM at least, so that one computes while the other waits.
        several = kernel == "decode_kernel" and shape.group <= 16
        assert result.metadata.shared <= SHARED[capability] // (2 if several else 1), kernel
        if shape.q_dtype == shape.kv_dtype != "float32" and kernel != "reduce_kernel":
            assert re.search(r"cp\.async\S* .*0x10", result.asm["ptx"]), "pages are not copied 16 bytes at a time"
            assert "mma" in result.asm["ptx"], "the tensor cores are idle"


@needs_triton
@pytest.mark.parametrize("capability", SHARED)
def test_pages_are_copied_16_bytes_at_a_time(capability, monkeypatch, tmp_path):
    found = []

    def record(kernel, *args, out_shape, grid, in_place, **options):
        found.append((kernel, [a.dtype.name for a in (*args, out_shape)], options))
        return args[0]

    monkeypatch.setattr(copy_backend, "launch", record)
    ids = jax.ShapeDtypeStruct((4,), jnp.int32)
    shapes = (Shape("bfloat16", "int8", 128, 4), Shape("bfloat16", "float8_e4m3fn", 64, 1), SHAPES[0])
    caches = [arguments(shape, ROWS)[0][1] for shape in shapes]
    jax.eval_shape(lambda caches, ids: [copy_backend.copy_pages_triton(c, ids, ids) for c in caches], caches, ids)
    assert len(found) == 5  # two of them with scales
    for kernel, dtypes, options in found:
        if "float8_e4m3fn" in dtypes and capability < 89:
            continue  # refused
        result = compiled(capability, kernel, dtypes, options, "copy_pages")
        _, stack = resources(result.asm["cubin"], tmp_path)
        assert (stack, result.metadata.shared) == (0, 0)
        if dtypes[0] != "float32":  # scales are too few for that: a word for each thread
            assert "ld.global.v4" in result.asm["ptx"]
            assert "st.global.v4" in result.asm["ptx"]


@needs_triton
def test_jax_lowers_the_calls_for_cuda(monkeypatch):
    pytest.importorskip("jax_triton", reason="jax_triton does not import: it needs the extras triton and cuda")
    gpu = Hardware("gpu", "NVIDIA H200", (9, 0))
    monkeypatch.setattr(dispatch, "current_hardware", lambda: gpu)
    monkeypatch.setattr(triton_call, "current_hardware", lambda: gpu)
    args, features = arguments(Shape("bfloat16", "bfloat16", 128, 4), 40)
    call = jax.jit(lambda args, features: paged_attention(*args, **features, soft_cap=5.0))
    text = call.trace(args, features).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@triton_kernel_call(") == 3
    args, _ = arguments(Shape("bfloat16", "int8", 128, 4), ROWS)
    call = jax.jit(lambda args: paged_attention(*args, max_q_len=1))
    text = call.trace(args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@triton_kernel_call(") == 2


def test_tiles_cover_every_query_of_every_row_with_more_than_one():
    rng = np.random.default_rng(0)
    for _ in range(50):
        lens = rng.integers(0, 9, rng.integers(1, 7)) * rng.integers(0, 5)
        block = int(rng.integers(1, 9))
        total = int(lens.sum())
        bound = total // block + min(len(lens), total // 2)
        rows, starts = backend.tiles_of(jnp.asarray(lens, jnp.int32), block, bound)
        tiles = [(int(b), int(s)) for b, s in zip(rows, starts, strict=True) if b < len(lens)]
        assert tiles == [(b, s) for b, n in enumerate(lens) if n > 1 for s in range(0, n, block)]
