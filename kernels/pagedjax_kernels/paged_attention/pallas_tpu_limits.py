"""What the TPU kernel serves. Apart from it, as importing Pallas takes 0.2 s, on machines without a TPU too."""

from __future__ import annotations

import math

import jax.numpy as jnp

from pagedjax_kernels.cache import FLOAT_DTYPES, LANE, QUANTIZED_DTYPES
from pagedjax_kernels.hardware import Hardware
from pagedjax_kernels.paged_attention.case import AttentionCase

MAX_TABLE = 2**17
"""Entries of a page table in scalar memory: half of its 1 MiB."""

MAX_PAGE_BYTES = 4 * 2**20
"""Two of them are in VMEM."""


MAX_QUANTIZED_HEADS = 64
"""A slot's scales must fit in a row of 128."""


def why_not_pallas_tpu(hardware: Hardware, case: AttentionCase) -> str | None:
    """The reason why the kernel cannot serve, or None."""
    if hardware.platform != "tpu":
        return "for TPUs only"
    return unservable(case)


def unservable(case: AttentionCase) -> str | None:
    """What the kernel cannot compute, interpreted or not, however the pages are laid out."""
    if case.q_dtype not in FLOAT_DTYPES:
        return f"queries must be {', '.join(FLOAT_DTYPES)}, got {case.q_dtype}"
    if case.kv_dtype == "float16":
        # Their bits in uint16 would do, but to reinterpret the pool XLA copies it.
        return "the compiler of TPU kernels, Mosaic, takes no float16 arrays, so pages cannot be float16"
    if case.kv_dtype in QUANTIZED_DTYPES and case.num_kv_heads > MAX_QUANTIZED_HEADS:
        return f"{case.kv_dtype} pages must have at most {MAX_QUANTIZED_HEADS} KV heads, got {case.num_kv_heads}"
    if case.kv_dtype in QUANTIZED_DTYPES and not case.packed_scales:
        return "scales must lie in rows of 128: allocate the pages with init_cache(platform='tpu')"
    width = case.page_head_dim * (2 if case.paired else 1)
    if width % LANE or (case.paired and width != LANE):
        # XLA keeps [.., 64] with the pages along the lanes: every call would copy the whole pool into rows of 128.
        return f"the pages' rows must be multiples of {LANE} wide, got {width}: allocate them with init_cache(platform='tpu')"
    if case.page_size % 8:
        return f"page_size must be a multiple of 8, got {case.page_size}"
    page_shape = (case.page_size, 2 * case.num_kv_heads, case.page_head_dim)  # of pairs as many elements
    if math.prod(page_shape) * jnp.dtype(case.kv_dtype).itemsize > MAX_PAGE_BYTES:
        return f"a page must have {MAX_PAGE_BYTES} bytes at most, got {' * '.join(map(str, page_shape))}"
    if case.num_rows * case.max_pages > MAX_TABLE:
        return f"the page table must have at most {MAX_TABLE} entries, got {case.num_rows} * {case.max_pages}"
    return None
