"""Every test runs under strict JAX: no silent promotion of dtypes or ranks."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Engines of the same shapes are made again and again: each program is compiled once, and not at all in the next run.
jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(__file__).resolve().parents[1] / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
