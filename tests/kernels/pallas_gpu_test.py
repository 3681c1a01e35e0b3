"""The Mosaic GPU kernel without a GPU: interpreted against the oracle, and lowered for CUDA."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from pagedjax_kernels import dispatch, paged_attention
from pagedjax_kernels.compat import JAX_VERSION
from pagedjax_kernels.hardware import Hardware
from pagedjax_kernels.paged_attention import api, pallas_gpu_limits
from pagedjax_kernels.paged_attention.pallas_gpu_limits import MIN_JAX, why_not_pallas_gpu

from tests.kernels.harness import as_on_a_gpu, make_call
from tests.kernels.paged_attention_test import PLAIN, check

pytestmark = [
    # A barrier that is never arrived at would hang for ever, in a callback that no signal interrupts.
    pytest.mark.timeout(600, method="thread"),
]
needs_mosaic = pytest.mark.skipif(JAX_VERSION < MIN_JAX, reason="JAX is too old for the kernel: it refuses by name")

H200 = Hardware("gpu", "NVIDIA H200", (9, 0))
CASE = PLAIN._replace(q_dtype="bfloat16", kv_dtype="bfloat16")


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    """Names backends "interpreted", and "long spans" with as many keys in a split as on a chip."""

    def run(*args, min_span):
        from jax.experimental.pallas import mosaic_gpu as plgpu
        from pagedjax_kernels.paged_attention.pallas_gpu import paged_attention_pallas_gpu

        # Memory that nobody wrote holds NaN.
        interpret = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
        return paged_attention_pallas_gpu(*args, interpret=interpret, min_span=min_span)

    more = [
        dispatch.Backend(name, lambda hardware, case: None, functools.partial(run, min_span=span))
        for name, span in (("interpreted", 64), ("long spans", None))
    ]
    monkeypatch.setattr(api, "BACKENDS", (*api.BACKENDS, *more))


def gpu_call(*args, **options):
    call = make_call(*args, **options)
    return dataclasses.replace(call, cache=as_on_a_gpu(call.cache))


ONES = [1, 1, 1, 1]
DECODE = {
    # (KV heads, group), head dim, page size, dtype, lengths, options
    "pages of a quarter of a block": ((1, 3), 64, 16, "bfloat16", [1, 0, 64, 150], {}),
    "a page is a block": ((2, 1), 128, 64, "float16", [70, 16, 0, 200], {"window": jnp.int32(21), "sinks": True}),
    "a page is four blocks": ((1, 8), 256, 256, "bfloat16", [70, 63, 1, 300], {"window": 7, "soft_cap": 2.0}),
}
MIXED = {
    "short pages": ((1, 8), 64, 8, "bfloat16", ([1, 0, 17, 40], [9, 0, 50, 40]), {"window": 13, "sinks": True}),
    "more blocks than stages": ((1, 3), 80, 24, "float16", ([1, 0, 45, 2], [9, 0, 230, 2]), {"scale": 0.3}),
    "head dim 256": ((1, 16), 256, 32, "bfloat16", ([6, 1, 0, 3], [150, 70, 3, 3]), {"window": jnp.int32(0)}),
}


@needs_mosaic
@pytest.mark.parametrize("name", DECODE)
def test_decode_equals_the_oracle(name):
    (kv_heads, group), dim, page, dtype, lengths, options = DECODE[name]
    call = gpu_call(
        ONES, lengths, page_size=page, num_kv_heads=kv_heads, group=group, head_dim=dim, kv_dtype=dtype, num_tokens=4
    )
    sinks = jnp.linspace(-1, 2, kv_heads * group) if options.get("sinks") else None
    check(call, backend="interpreted", max_q_len=1, **{**options, "sinks": sinks})


@needs_mosaic
@pytest.mark.parametrize("name", MIXED)
def test_mixed_batches_equal_the_oracle(name):
    (kv_heads, group), dim, page, dtype, lengths, options = MIXED[name]
    call = gpu_call(*lengths, page_size=page, num_kv_heads=kv_heads, group=group, head_dim=dim, kv_dtype=dtype)
    sinks = jnp.linspace(-1, 2, kv_heads * group) if options.get("sinks") else None
    check(call, backend="interpreted", **{**options, "sinks": sinks})


@needs_mosaic
def test_buffers_are_used_again_and_again():
    """Splits of eight blocks, with four stages, in one row of two."""
    call = gpu_call([1], [900], page_size=64, num_kv_heads=1, group=2, head_dim=128, kv_dtype="bfloat16", num_tokens=1)
    check(call, backend="long spans", max_q_len=1)


@needs_mosaic
def test_pages_behind_the_window_are_not_read():
    """Given back, they may hold anything: here page 0, which is poisoned. The window ends within a page."""
    size, window, q_lens, kv_lens = 8, 13, [1, 9], [70, 150]
    call = gpu_call(q_lens, kv_lens, page_size=size, num_kv_heads=1, group=2, head_dim=64, kv_dtype="bfloat16")
    table = np.asarray(call.page_table).copy()
    for b, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        table[b, : max(kv_len - q_len - window + 1, 0) // size] = 0
    assert (table[:, 0] == 0).all()
    check(dataclasses.replace(call, page_table=jnp.asarray(table)), backend="interpreted", window=window)


@needs_mosaic
@pytest.mark.parametrize("max_q_len", [1, None])
def test_only_empty_rows(max_q_len):
    call = gpu_call([0, 0], [0, 0], page_size=8, num_kv_heads=1, group=2, num_tokens=2, kv_dtype="bfloat16")
    run = jax.jit(functools.partial(paged_attention, backend="interpreted", max_q_len=max_q_len))
    np.testing.assert_array_equal(run(*call.args), 0)  # the queries are NaN


@needs_mosaic
def test_output_does_not_depend_on_batch_mates():
    """Bit for bit: alone among empty rows, and in a full batch."""
    q_lens, kv_lens = [1, 12], [130, 40]
    call = gpu_call(
        q_lens, kv_lens, page_size=8, num_kv_heads=1, group=2, head_dim=64, num_tokens=13, kv_dtype="bfloat16"
    )
    run = jax.jit(functools.partial(paged_attention, backend="interpreted", window=100))
    together, starts = np.asarray(run(*call.args)), np.asarray(call.cu_q_lens)
    for b in range(2):
        q, cache, layer, table, lens, _ = call.args
        cu = jnp.asarray(np.where(np.arange(3) > b, q_lens[b], 0), jnp.int32)
        lens = jnp.where(jnp.arange(2) == b, lens, 0)
        alone = np.asarray(run(jnp.roll(q, -int(starts[b]), axis=0), cache, layer, table, lens, cu))
        np.testing.assert_array_equal(alone[: q_lens[b]], together[starts[b] : starts[b + 1]])


@needs_mosaic
@pytest.mark.parametrize("dim", [64, 256])
def test_lowers_for_cuda(dim, monkeypatch):
    """What Pallas itself refuses: layouts, transforms. For what the chip's compiler does: pallas_gpu_compile_test.py."""
    monkeypatch.setattr(dispatch, "current_hardware", lambda: H200)
    call = gpu_call([1, 9, 0], [30, 9, 0], page_size=16, head_dim=dim, kv_dtype="bfloat16")
    q, cache, *rest = call.args
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), (q, cache, *rest))
    run = jax.jit(lambda *args: paged_attention(*args, soft_cap=5.0, window=9, backend="pallas_gpu"))
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("_aot",), abstract_device=device)):
        text = run.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 2  # decode and prefill


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("queries and pages must both be bfloat16 or both float16, got float32", {"q_dtype": "float32"}),
        ("queries and pages must both be bfloat16 or both float16, got bfloat16 and int8", {"kv_dtype": "int8"}),
        ("the pages' head dim must be a multiple of 64, got 32", {"page_head_dim": 32}),
        ("page_size must be a multiple of 8 (the rows of a swizzled tile), got 12", {"page_size": 12}),
        ("at most 64 query heads per KV head, got 128", {"num_heads": 256}),
        ("at most 65535 rows and queries together in a call", {"num_rows": 65535}),
    ],
)
def test_says_why_not(reason, change, monkeypatch):
    monkeypatch.setattr(pallas_gpu_limits, "JAX_VERSION", MIN_JAX)
    assert why_not_pallas_gpu(H200, CASE) is None
    assert reason in why_not_pallas_gpu(H200, CASE._replace(**change))


def test_says_why_not_here(monkeypatch):
    assert why_not_pallas_gpu(Hardware("tpu", "TPU v5e"), CASE) == "for NVIDIA GPUs only"
    monkeypatch.setattr(pallas_gpu_limits, "JAX_VERSION", MIN_JAX)
    for capability in ((8, 0), (10, 0), (12, 0)):
        gpu = Hardware("gpu", "another", capability)
        assert f"this GPU has {capability[0]}.{capability[1]}" in why_not_pallas_gpu(gpu, CASE)
    monkeypatch.setattr(pallas_gpu_limits, "JAX_VERSION", (0, 10, 2))
    assert "needs JAX 0.11.2 or newer" in why_not_pallas_gpu(H200, CASE)
