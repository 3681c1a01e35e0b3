"""The Pallas-on-Triton decode kernel for GPUs: interpreted against the oracle, and lowered for CUDA; neither needs a GPU."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from pagedjax_kernels import dispatch, paged_attention
from pagedjax_kernels.hardware import Hardware
from pagedjax_kernels.paged_attention import pallas_gpu_triton as pallas_gpu

from tests.kernels.harness import as_on_a_gpu, make_call
from tests.kernels.paged_attention_test import PLAIN, check, lengths

H200 = Hardware("gpu", "NVIDIA H200", (9, 0))


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """As far as the choice of the backend goes."""
    monkeypatch.setattr(dispatch, "current_hardware", lambda: H200)


@pytest.mark.parametrize(
    ("page_size", "group", "head_dim", "dtype", "options"),
    [
        (16, 3, 64, "float32", {}),
        (8, 1, 64, "float32", {"soft_cap": 2.0, "window": 7}),
        (16, 8, 128, "bfloat16", {"scale": 0.3, "window": jnp.int32(21)}),
        (7, 3, 80, "float16", {"sinks": True, "window": jnp.int32(0)}),
        (64, 1, 128, "float32", {"sinks": True, "window": 13}),
    ],
)
def test_equals_the_oracle(page_size, group, head_dim, dtype, options, monkeypatch):
    monkeypatch.setattr(pallas_gpu, "INTERPRET", True)
    _, kv_lens = lengths("decode", page_size)
    call = make_call(
        [1] * 7, [*kv_lens, 600], page_size=page_size, group=group, head_dim=head_dim, kv_dtype=dtype, num_tokens=7
    )
    call = dataclasses.replace(call, cache=as_on_a_gpu(call.cache))
    if "sinks" in options:
        options = {**options, "sinks": jnp.linspace(-1, 1, 2 * group, dtype=jnp.float32)}
    check(call, backend="pallas_gpu_triton", max_q_len=1, **options)


def test_splits_grow_with_the_row(monkeypatch):
    monkeypatch.setattr(pallas_gpu, "INTERPRET", True)
    kv_lens = [pallas_gpu.SPLITS * pallas_gpu.MIN_SPAN + 65, 257]
    call = make_call([1, 1], kv_lens, num_kv_heads=1, group=2, page_size=64, num_tokens=2)
    check(call, backend="pallas_gpu_triton", max_q_len=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lowers_for_cuda(dtype):
    call = make_call([1] * 4, [30, 0, 1, 99], kv_dtype=dtype, num_tokens=4)
    run = jax.jit(
        lambda *args: paged_attention(*args, max_q_len=1, soft_cap=5.0, window=9, backend="pallas_gpu_triton")
    )
    q, cache, *rest = call.args
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), (q, as_on_a_gpu(cache), *rest))
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("_aot",), abstract_device=device)):
        text = run.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "xla.gpu.triton" in text


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("for decode only", {"max_q_len": None}),
        ("queries and pages must be of one float type", {"kv_dtype": "int8"}),
        ("the head dim must be a multiple of 16", {"head_dim": 72}),
        ("at most 32 query heads per KV head, got 64", {"num_heads": 128}),
    ],
)
def test_says_why_not(reason, change):
    case = PLAIN._replace(max_q_len=1)
    assert pallas_gpu.why_not_pallas_gpu_triton(H200, case) is None
    assert reason in pallas_gpu.why_not_pallas_gpu_triton(H200, case._replace(**change))
