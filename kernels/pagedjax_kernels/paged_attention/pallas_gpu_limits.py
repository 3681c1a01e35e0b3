"""What the Mosaic GPU kernel serves. Apart from it, as importing Pallas takes 0.2 s, on machines without a GPU too."""

from __future__ import annotations

import jax

from pagedjax_kernels.cache import LAYOUT_REFUSED
from pagedjax_kernels.compat import JAX_VERSION
from pagedjax_kernels.hardware import Hardware
from pagedjax_kernels.paged_attention.case import AttentionCase

MIN_JAX = (0, 11, 2)
"""The oldest that the kernel was compiled and interpreted with; 0.10.2 has no such interpreter."""

DTYPES = ("bfloat16", "float16")
MAX_GROUP = 64
"""Rows of one warpgroup's products."""

MAX_TILES = 65535
"""Of a grid's second axis; a call has no more tiles than rows and queries together."""


def why_not_pallas_gpu(hardware: Hardware, case: AttentionCase) -> str | None:
    """The reason why this backend cannot serve, or None."""
    if hardware.platform != "gpu" or hardware.compute_capability is None:
        return "for NVIDIA GPUs only"
    if JAX_VERSION < MIN_JAX:
        return f"needs JAX {'.'.join(map(str, MIN_JAX))} or newer (Pallas on Mosaic GPU), this is {jax.__version__}"
    if hardware.compute_capability != (9, 0):
        capability = ".".join(map(str, hardware.compute_capability))
        return f"needs compute capability 9.0 (Hopper: the kernel uses wgmma), this GPU has {capability}"
    return unservable(case)


def unservable(case: AttentionCase) -> str | None:
    """What the kernel cannot compute, interpreted or not."""
    if case.paired or case.packed_scales:
        return LAYOUT_REFUSED
    if case.q_dtype not in DTYPES or case.q_dtype != case.kv_dtype:
        return f"queries and pages must both be bfloat16 or both float16, got {case.q_dtype} and {case.kv_dtype}"
    if case.page_head_dim % 64:
        return f"the pages' head dim must be a multiple of 64, got {case.page_head_dim}"
    if case.page_size % 8:
        return f"page_size must be a multiple of 8 (the rows of a swizzled tile), got {case.page_size}"
    group = case.num_heads // case.num_kv_heads
    if group > MAX_GROUP:
        return f"at most {MAX_GROUP} query heads per KV head, got {group}"
    if case.num_rows + case.num_tokens > MAX_TILES:
        return f"at most {MAX_TILES} rows and queries together in a call, got {case.num_rows} and {case.num_tokens}"
    return None
