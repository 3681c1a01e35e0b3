"""Decode attention over contiguous keys and values, by what others offer: what paging is compared with.

- `torch`: scaled_dot_product_attention. On a GPU its flash kernel, which splits long rows (flash decoding); each call is a
  launch from Python, some ten microseconds, unlike the others, which run in one compiled loop.
- `cudnn`, `xla`: jax.nn.dot_product_attention with that implementation.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from kernel_calls import Model, best_seconds

CONTIGUOUS = ("torch", "cudnn", "xla")


def contiguous_seconds(
    name: str, model: Model, rows: int, context: int, *, num_layers: int, steps: int, repeat: int
) -> float:
    """One call over rows of `context` tokens each, of at least `steps` over the layers in turns.

    Raises:
      NotImplementedError: what is named cannot serve here; with the reason.
    """
    steps = max(steps, num_layers)
    if model.kv_dtype != model.dtype:
        raise NotImplementedError(f"{name}: contiguous keys and values have the dtype of the queries")
    if name == "torch":
        return _torch_seconds(model, rows, context, num_layers, steps, repeat)
    try:
        return _jax_seconds(name, model, rows, context, num_layers, steps, repeat)
    except (ValueError, RuntimeError, NotImplementedError) as reason:
        raise NotImplementedError(f"{name}: {str(reason).splitlines()[0]}") from reason


def _jax_seconds(name: str, model: Model, rows: int, context: int, num_layers: int, steps: int, repeat: int) -> float:
    dtype = jnp.dtype(model.dtype)
    shape = (num_layers, 2, rows, context, model.kv_heads, model.head_dim)

    @jax.jit
    def filled() -> jax.Array:
        wave = jnp.sin(lax.broadcasted_iota(jnp.float32, shape, 3) + lax.broadcasted_iota(jnp.float32, shape, 5))
        return wave.astype(dtype)

    kv = filled()
    q = jnp.ones((rows, 1, model.heads, model.head_dim), dtype)

    @jax.jit
    def run(q: jax.Array, kv: jax.Array) -> jax.Array:
        def again(i: jax.Array, q: jax.Array) -> jax.Array:
            k, v = lax.dynamic_index_in_dim(kv, i % num_layers, keepdims=False)
            return jax.nn.dot_product_attention(q, k, v, scale=model.head_dim**-0.5, implementation=name)  # type: ignore[arg-type]

        return lax.fori_loop(0, steps, again, q)

    return best_seconds(lambda: run(q, kv), repeat) / steps


def _torch_seconds(model: Model, rows: int, context: int, num_layers: int, steps: int, repeat: int) -> float:
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention
    except ImportError as reason:
        raise NotImplementedError(f"torch: {reason}") from reason
    on_gpu = jax.default_backend() == "gpu" and torch.cuda.is_available()
    device, dtype = "cuda" if on_gpu else "cpu", getattr(torch, model.dtype)
    layers = [
        [torch.randn(rows, model.kv_heads, context, model.head_dim, device=device, dtype=dtype) for _ in range(2)]
        for _ in range(num_layers)
    ]
    q = torch.randn(rows, model.heads, 1, model.head_dim, device=device, dtype=dtype)
    choice: Any = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if on_gpu else contextlib.nullcontext()
    wait: Callable[[], None] = torch.cuda.synchronize if on_gpu else lambda: None

    def run() -> None:
        for i in range(steps):
            k, v = layers[i % num_layers]
            scaled_dot_product_attention(q, k, v, enable_gqa=model.heads != model.kv_heads)
        wait()

    best = float("inf")
    try:
        with choice, torch.no_grad():
            run()
            for _ in range(repeat):
                started = time.perf_counter()
                run()
                best = min(best, time.perf_counter() - started)
    except RuntimeError as reason:
        raise NotImplementedError(f"torch: {str(reason).splitlines()[0]}") from reason
    return best / steps
