"""Triton kernels as JAX calls, through jax-triton: what the ops' Triton backends share. Imports triton at first use."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax

from pagedjax_kernels.hardware import Hardware, current_hardware

MIN_CAPABILITY = (8, 0)
FP8_CAPABILITY = (8, 9)
"""From here on Triton has a type for float8_e4m3fn, even if only to copy it."""


@functools.cache
def _why_not_installed() -> str | None:
    """Imports what is needed, once: a package that is there may still not load."""
    for name in ("triton", "jax_triton"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            return f"{name} does not import ({error}): install the extra pagedjax[triton]"
    return None


def why_not_here(hardware: Hardware, kv_dtype: str) -> str | None:
    """The reason why no Triton kernel can run on this device with such pages, or None. Says nothing about what is
    installed."""
    if hardware.platform != "gpu" or hardware.compute_capability is None:
        return "for NVIDIA GPUs only"
    capability = ".".join(str(n) for n in hardware.compute_capability)
    if hardware.compute_capability < MIN_CAPABILITY:
        return f"needs compute capability 8.0 or higher (Ampere), this GPU has {capability}"
    if kv_dtype == "float8_e4m3fn" and hardware.compute_capability < FP8_CAPABILITY:
        return f"float8_e4m3fn pages need compute capability 8.9 or higher, this GPU has {capability}"
    return None


def why_not_installed() -> str | None:
    """The reason why Triton kernels cannot be launched from here, or None."""
    return _why_not_installed()


def launch(
    module: str,
    kernel: str,
    *args: jax.Array,
    out_shape: Any,
    grid: tuple[int, ...],
    zeroed: bool = False,
    in_place: bool = False,
    **options: Any,
) -> Any:
    """Calls a kernel by name.

    Args:
      module: the module that holds it, `pagedjax_kernels.<op>.<file>`.
      args: the kernel's inputs; its outputs follow them in its parameters.
      out_shape: ShapeDtypeStruct of the output, or a list of them.
      zeroed: whether the (first) output is zeroed before.
      in_place: whether the first output is the first input's memory.
      options: num_warps, num_stages, and the kernel's constants.
    """
    import jax_triton

    capability = current_hardware().compute_capability
    assert capability is not None  # why_not_here has seen to it
    return jax_triton.triton_call(
        *args,
        kernel=getattr(importlib.import_module(module), kernel),
        out_shape=out_shape,
        grid=grid,
        name=f"{module.split('.')[1]}_{kernel}",
        compute_capability=10 * capability[0] + capability[1],
        zeroed_outputs=(0,) if zeroed else (),
        input_output_aliases={0: 0} if in_place else {},
        **options,
    )
