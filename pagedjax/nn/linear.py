"""Matrix products with the accumulation that every layer here wants."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def linear(x: jax.Array, kernel: jax.Array, num_contracted: int = 1) -> jax.Array:
    """x [T, *i] @ kernel [*i, *o] -> f32[T, *o], contracting the first `num_contracted` axes of the kernel.

    Accumulates and returns float32 whatever the inputs (which share one dtype): asking for it also takes the fast path
    for bfloat16 on CPUs. float32 inputs are multiplied in full float32, never in TF32 or bfloat16 passes.
    """
    outer, inner = kernel.shape[num_contracted:], kernel.shape[:num_contracted]
    flat = kernel.reshape(_product(inner), _product(outer))
    y = lax.dot_general(
        x.reshape(x.shape[0], flat.shape[0]),
        flat,
        (((1,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return y.reshape(x.shape[0], *outer)


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total
