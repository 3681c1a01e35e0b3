"""What differs between the JAX versions we support (0.10.2 to 0.12). Everything else in the package is version-free."""

from __future__ import annotations

import jax

JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3])


def bf16_scatter_is_in_place(platform: str) -> bool:
    """Whether writing bfloat16 pages leaves the rest of them alone.

    XLA's CPU backend in JAX 0.10 converts the whole operand of a bfloat16 scatter to float32 and back; float32, float16
    and int8 pages are written in place there. From 0.12 on all of them are.
    """
    return platform != "cpu" or JAX_VERSION >= (0, 12)
