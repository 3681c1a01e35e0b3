"""Which backend serves, and what is said about it."""

from __future__ import annotations

import logging

import pytest
from pagedjax_kernels import dispatch, triton_call
from pagedjax_kernels.copy_pages import triton as copy_triton
from pagedjax_kernels.hardware import Hardware, current_hardware
from pagedjax_kernels.paged_attention import triton
from pagedjax_kernels.paged_attention.case import AttentionCase

FAST = dispatch.Backend("fast", lambda hardware, case: "needs a group of 4" if case != 4 else None, lambda: "fast")
SLOW = dispatch.Backend("slow", lambda hardware, case: None, lambda: "slow")
ORACLE = dispatch.Backend("oracle", lambda hardware, case: None, lambda: "oracle", automatic=False)


def test_auto_takes_the_first_that_can_and_says_why_once(caplog):
    caplog.set_level(logging.INFO, "pagedjax_kernels")
    assert dispatch.pick("op a", (FAST, SLOW), "auto", 4).name == "fast"
    for _ in range(2):
        assert dispatch.pick("op a", (FAST, SLOW), "auto", 3).name == "slow"
    told = [r.getMessage() for r in caplog.records]
    assert len(told) == 2
    assert "backend slow" in told[1]
    assert "fast: needs a group of 4" in told[1]


def test_a_named_backend_serves_or_fails():
    assert dispatch.pick("op b", (FAST, ORACLE), "oracle", 3).name == "oracle"
    with pytest.raises(NotImplementedError, match=r"op b: backend 'fast' cannot serve .* needs a group of 4"):
        dispatch.pick("op b", (FAST, SLOW), "fast", 3)
    with pytest.raises(ValueError, match="must be 'auto' or one of fast, slow; got 'quick'"):
        dispatch.pick("op b", (FAST, SLOW), "quick", 4)


def test_auto_with_nobody_left():
    with pytest.raises(NotImplementedError, match=r"no backend can serve .*fast: needs a group of 4"):
        dispatch.pick("op c", (FAST, ORACLE), "auto", 3)


def test_hardware_is_the_default_device():
    assert isinstance(current_hardware(), Hardware)
    assert current_hardware().platform in ("cpu", "gpu", "tpu")


H100 = Hardware("gpu", "NVIDIA H100", (9, 0))
PLAIN = AttentionCase(4, 4, 4, 8, 2, 128, 128, 16, "bfloat16", "bfloat16", None, 0.1, None, "none", False)


@pytest.mark.parametrize(
    ("reason", "hardware", "change"),
    [
        ("for NVIDIA GPUs only", Hardware("cpu", "cpu"), {}),
        ("for NVIDIA GPUs only", Hardware("gpu", "AMD MI300"), {}),
        ("needs compute capability 8.0 or higher (Ampere), this GPU has 7.5", Hardware("gpu", "T4", (7, 5)), {}),
        ("float8_e4m3fn pages need compute", Hardware("gpu", "A100", (8, 0)), {"kv_dtype": "float8_e4m3fn"}),
        ("the head dim must be a multiple of 16, 16 to 256, got 8", H100, {"head_dim": 8}),
        ("at most 32 query heads per KV head for float32", H100, {"num_heads": 128, "q_dtype": "float32"}),
        ("queries must be float32, bfloat16, float16, got float64", H100, {"q_dtype": "float64"}),
        ("the pages lie as on TPUs", H100, {"paired": True}),
        ("the pages lie as on TPUs", H100, {"packed_scales": True}),
        ("triton does not import (gone): install the extra pagedjax[triton]", H100, {}),
    ],
)
def test_triton_says_why_not(reason, hardware, change, monkeypatch):
    def gone(name):
        raise ImportError("gone")

    monkeypatch.setattr(triton_call.importlib, "import_module", gone)
    triton_call._why_not_installed.cache_clear()
    assert reason in triton.why_not_triton(hardware, PLAIN._replace(**change))
    triton_call._why_not_installed.cache_clear()


def test_triton_serves_where_it_can(monkeypatch):
    monkeypatch.setattr(triton_call, "_why_not_installed", lambda: None)
    for capability in ((8, 0), (9, 0), (10, 0)):
        assert triton.why_not_triton(Hardware("gpu", "some", capability), PLAIN) is None
    assert triton.why_not_triton(Hardware("gpu", "L4", (8, 9)), PLAIN._replace(kv_dtype="float8_e4m3fn")) is None


@pytest.mark.parametrize(
    ("reason", "hardware", "case"),
    [
        ("for NVIDIA GPUs only", Hardware("cpu", "cpu"), ("float32", 64, 2)),
        ("this GPU has 7.5", Hardware("gpu", "T4", (7, 5)), ("float32", 64, 2)),
        ("float8_e4m3fn pages need", Hardware("gpu", "A100", (8, 0)), ("float8_e4m3fn", 64, 2)),
        ("must be a multiple of 4 bytes, got 6", H100, ("int8", 6, 2)),
        ("at most 65535 layers, got 70000", H100, ("int8", 64, 70000)),
    ],
)
def test_copies_by_triton_say_why_not(reason, hardware, case, monkeypatch):
    monkeypatch.setattr(triton_call, "_why_not_installed", lambda: None)
    assert reason in copy_triton.why_not_triton(hardware, copy_triton.CopyCase(*case))
    assert copy_triton.why_not_triton(H100, copy_triton.CopyCase("float8_e4m3fn", 64, 2)) is None
