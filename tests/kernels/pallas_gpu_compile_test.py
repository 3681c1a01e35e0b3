"""The Mosaic GPU kernels compiled to machine code for an H200, on a machine without one: what they ask of it."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from pagedjax_kernels import KVCache, dispatch, paged_attention
from pagedjax_kernels.compat import JAX_VERSION
from pagedjax_kernels.hardware import Hardware
from pagedjax_kernels.paged_attention.pallas_gpu_limits import MIN_JAX

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None,
        reason="JAX's CUDA plugin, which compiles without a GPU, is not installed (jax[cuda13-local])",
    ),
    pytest.mark.skipif(JAX_VERSION < MIN_JAX, reason="JAX is too old for the kernel: it refuses by name"),
]

TARGET = pathlib.Path(__file__).resolve().parents[2] / "kernels" / "targets" / "h200.txtpb"
SHARED = 232448  # bytes that a block may have
BARRIERS = 1024  # more than they take


class Shape(NamedTuple):
    """Attributes:
    head_dim, group, page, dtype: what plans follow from.
    features: window, soft cap and sinks, all or none.
    pages: N.
    """

    head_dim: int
    group: int
    page: int
    dtype: str
    features: bool
    pages: int = 100


SHAPES = [
    Shape(64, 3, 16, "bfloat16", False),
    Shape(128, 4, 16, "bfloat16", True, 600_000),  # 9.8e9 elements
    Shape(128, 64, 8, "float16", True),
    Shape(192, 1, 64, "bfloat16", False),
    Shape(256, 8, 256, "float16", True),
]


def arguments(shape: Shape) -> tuple[tuple, dict]:
    """Shapes of a call of paged_attention: (positional, keyword)."""
    topology = topologies.get_topology_desc("h200", platform="cuda", target_config=TARGET.read_text(), topology="1x1x1")
    on = jax.sharding.SingleDeviceSharding(topology.devices[0])
    of = functools.partial(jax.ShapeDtypeStruct, sharding=on)
    rows, kv_heads = 8, 2
    cache = KVCache(of((2, shape.pages, shape.page, 2 * kv_heads, shape.head_dim), shape.dtype))
    q = of((300, kv_heads * shape.group, shape.head_dim), shape.dtype)
    ints = [of(s, jnp.int32) for s in ((), (rows, 64), (rows,), (rows + 1,))]
    sinks = of((kv_heads * shape.group,), jnp.float32)
    return (q, cache, *ints), {"window": of((), jnp.int32), "sinks": sinks} if shape.features else {}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
def test_compiles_for_an_h200(shape, monkeypatch, capfd):
    monkeypatch.setattr(dispatch, "current_hardware", lambda: Hardware("gpu", "NVIDIA H200", (9, 0)))
    for what in ("PTX", "PTXAS", "RESOURCES"):
        monkeypatch.setenv(f"MOSAIC_GPU_DUMP_{what}", "1")
    args, features = arguments(shape)
    soft_cap = 20.0 if shape.features else None
    call = jax.jit(lambda args, features: paged_attention(*args, **features, soft_cap=soft_cap, backend="pallas_gpu"))
    compiled = call.lower(args, features).compile()
    said = "".join(capfd.readouterr())

    kernels = re.findall(r"\.entry (\w+)", said)
    assert len(kernels) == 2, kernels  # decode and prefill
    assert re.findall(r"(\d+) bytes spill", said) == ["0"] * 4, "registers are spilled"
    shared = [int(n) for n in re.findall(r"smem_scratch_bytes=(\d+)", said)]
    assert len(shared) == 2
    assert max(shared) <= SHARED - BARRIERS
    for kernel in said.split(".entry ")[1:]:
        assert "wgmma.mma_async" in kernel, "the tensor cores are idle"
        assert "cp.async.bulk.tensor" in kernel, "pages are not copied by the copy engine"
    assert compiled.memory_analysis().temp_size_in_bytes < 64 << 20, "the pool is copied"
