"""Which backend serves, and what is said about it."""

from __future__ import annotations

import logging

import pytest
from pagedjax_kernels import dispatch
from pagedjax_kernels.hardware import Hardware, current_hardware

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
