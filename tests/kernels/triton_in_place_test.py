"""On a GPU nothing in a step copies the pages either: XLA's program for an H200, which needs no GPU to be made.

Its own account of memory says whether the pool is aliased and how much is temporary, and its text whether a write is the
one scatter that it should be.
"""

from __future__ import annotations

import importlib
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from pagedjax_kernels import KVCache, copy_pages, dispatch, kv_update, paged_attention, triton_call
from pagedjax_kernels.hardware import Hardware

GPU = Hardware("gpu", "NVIDIA H200", (9, 0))
TARGET = pathlib.Path(__file__).resolve().parents[2] / "kernels" / "targets" / "h200.txtpb"
DTYPES = ("bfloat16", "float32", "float16", "int8", "float8_e4m3fn")
LAYERS, PAGES, SIZE, KV_HEADS, DIM, ROWS, GROUP = 4, 65536, 16, 8, 128, 64, 4
"""More than 2^31 elements; nothing is allocated."""


@pytest.fixture(scope="module")
def device():
    """A described H200."""
    for package in ("jax_cuda13_plugin", "jax_triton"):
        pytest.importorskip(package, reason=f"{package} is not installed: pagedjax[triton] and jax[cuda13-local]")
    from jax.experimental import topologies

    # Programs for a device that is not there cannot be read back from the cache on disk: none is to be kept.
    shortest = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    yield topologies.get_topology_desc(
        "h200", platform="cuda", target_config=TARGET.read_text(), topology="1x1x1"
    ).devices[0]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", shortest)


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """What asks for the device while tracing is told that it is one."""
    for module in (dispatch, triton_call, importlib.import_module("pagedjax_kernels.paged_attention.xla_decode")):
        monkeypatch.setattr(module, "current_hardware", lambda: GPU)


def compiled(device, run, dtype):
    """(pool's bytes, memory analysis, text) of `run(cache, k, slots, q, table)` for that device, the cache donated."""
    sharding = jax.sharding.SingleDeviceSharding(device)

    def of(shape, dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    quantized = dtype in ("int8", "float8_e4m3fn")
    pages = (LAYERS, PAGES, SIZE, 2 * KV_HEADS, DIM)
    cache = KVCache(of(pages, dtype), of(pages[:-1], "float32") if quantized else None)
    q_dtype = "bfloat16" if quantized else dtype
    k, q = of((ROWS, KV_HEADS, DIM), q_dtype), of((ROWS, GROUP * KV_HEADS, DIM), q_dtype)
    args = (cache, k, of((ROWS,), "int32"), q, of((ROWS, 64), "int32"))
    program = jax.jit(run, donate_argnums=0).lower(*args).compile()
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    return size, program.memory_analysis(), program.as_text()


def assert_in_place(size, memory):
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 50


def layers(cache, k, slots, q, table, max_q_len, backend):
    """Write and attend, layer after layer, the cache in the scan's carry."""
    cu_q_lens = jnp.arange(ROWS + 1, dtype=jnp.int32)

    def body(carry, layer):
        cache, q = carry
        cache = kv_update(cache, k, k, layer, slots)
        out = paged_attention(q, cache, layer, table, slots, cu_q_lens, max_q_len=max_q_len, backend=backend)
        return (cache, out), None

    return lax.scan(body, (cache, q), jnp.arange(LAYERS, dtype=jnp.int32))[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_update_is_one_scatter_in_place(device, dtype):
    """Quantised pages: one for elements, one for scales, and the scales' maximum before. No sort, no loop, no copy."""
    run = lambda cache, k, slots, q, table: kv_update(cache, k, k, slots[0], slots, backend="xla")  # noqa: E731
    size, memory, text = compiled(device, run, dtype)
    assert_in_place(size, memory)
    assert memory.temp_size_in_bytes < 2**20
    quantized = dtype in ("int8", "float8_e4m3fn")
    assert len(re.findall(r"= \S+ scatter\(", text)) == (2 if quantized else 1)
    assert not re.findall(r"= \S+ (sort|while|copy|custom-call)\(", text)
    entry = text[text.index("\nENTRY") :]
    assert len(re.findall(r" fusion\(", entry)) == (3 if quantized else 1), entry


@pytest.mark.parametrize(
    ("backend", "dtype"), [*(("triton", dtype) for dtype in DTYPES), ("xla", "bfloat16"), ("xla", "int8")]
)
def test_copy_pages_is_in_place(device, dtype, backend):
    run = lambda cache, k, slots, q, table: copy_pages(cache, slots, slots + 1, backend=backend)  # noqa: E731
    size, memory, text = compiled(device, run, dtype)
    assert_in_place(size, memory)
    assert (" while(" in text) == (backend == "xla")  # the loop asks the device, copy by copy


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("triton", "bfloat16"), ("triton", "int8"), ("triton", "float8_e4m3fn"), ("xla", "bfloat16")],
)
def test_decode_loop_with_copies_is_in_place(device, backend, dtype):
    """A while_loop of steps, each with page copies and a scan over layers that write and read, as the engine's."""

    def run(cache, k, slots, q, table):
        def step(state):
            cache, q, i = state
            cache = copy_pages(cache, slots, slots + i, backend=backend)
            cache, q = layers(cache, k, slots, q, table, 1, backend)
            return cache, q, i + 1

        return lax.while_loop(lambda s: s[2] < slots[0], step, (cache, q, jnp.int32(0)))

    assert_in_place(*compiled(device, run, dtype)[:2])


@pytest.mark.parametrize("backend", ["triton", "xla"])
def test_mixed_step_is_in_place(device, backend):
    assert_in_place(*compiled(device, lambda *a: layers(*a, None, backend), "bfloat16")[:2])


def test_these_tests_see_a_copy(device):
    """What is read from the pages before the write, at a place that is known only after it, has to be kept."""

    def run(cache, k, slots, q, table):
        after = kv_update(cache, k, k, 0, slots)
        place = slots + (after.kv_pages[0, slots, 0, 0, 0] > 0).astype(jnp.int32)
        return after, cache.kv_pages[1, place]

    size, memory, _ = compiled(device, run, "bfloat16")
    with pytest.raises(AssertionError):
        assert_in_place(size, memory)
