"""Every test runs under strict JAX: no silent promotion of dtypes or ranks."""

import gc
import os
import pathlib
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["PAGEDJAX_TUNED"] = "0"  # what was measured on this machine is no business of tests

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Engines of the same shapes are made again and again: each program is compiled once, and not at all in the next run.
jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(__file__).resolve().parents[1] / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


@pytest.fixture(scope="module", autouse=True)
def programs_are_let_go():
    """After each file. The kernel limits how many pieces of memory a process maps, and compiled code is thousands of them:
    one process with all programs of all tests would be aborted."""
    yield
    if (tiny := sys.modules.get("tests.engine.tiny")) is not None:
        tiny._programs.cache_clear()
    jax.clear_caches()
    gc.collect()
