"""copy_pages for NVIDIA GPUs (sm80 and newer): all copies in one launch for each array.

XLA's loop (`xla.py`) takes a turn for each copy there: it asks the device whether there is another one, and moves a page
through a temporary, four launches or more. This asks for nothing, and a call without copies is one launch whose programs
return at once.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax

from pagedjax_kernels import triton_call
from pagedjax_kernels.cache import KVCache
from pagedjax_kernels.hardware import Hardware

BLOCK_WORDS = 4096
"""Words of 4 bytes that a program moves: 16 KiB."""
WARPS = 8


class CopyCase(NamedTuple):
    """The static facts of one call.

    Attributes:
      kv_dtype: of the pages.
      page_bytes: of one page of one layer.
      num_layers: as it says.
    """

    kv_dtype: str
    page_bytes: int
    num_layers: int


def why_not_triton(hardware: Hardware, case: CopyCase) -> str | None:
    """The reason why this backend cannot serve, or None."""
    reason = triton_call.why_not_here(hardware, case.kv_dtype)
    if reason is not None:
        return reason
    if case.page_bytes % 4:
        return f"a page of a layer must be a multiple of 4 bytes, got {case.page_bytes}"
    if case.num_layers > 65535:
        return f"at most 65535 layers, got {case.num_layers}"
    return triton_call.why_not_installed()


launch = functools.partial(triton_call.launch, "pagedjax_kernels.copy_pages.triton_kernels")
"""Calls a kernel of triton_kernels.py by name. Tests put the interpreter here."""


def copy_pages_triton(cache: KVCache, src: jax.Array, dst: jax.Array) -> KVCache:
    """See copy_pages."""
    if src.shape[0] == 0:
        return cache
    return jax.tree.map(lambda pages: _copy(pages, src, dst), cache)


def _copy(pages: jax.Array, src: jax.Array, dst: jax.Array) -> jax.Array:
    """pages [L, N, ..] of any type, in place where it is donated."""
    num_layers, num_pages = pages.shape[:2]
    words = pages.size // (num_layers * num_pages) * pages.dtype.itemsize // 4
    block = min(BLOCK_WORDS, 1 << (words - 1).bit_length())
    return launch(
        "copy_kernel",
        *(pages, src, dst),
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        grid=(src.shape[0], num_layers, -(-words // block)),
        in_place=True,
        num_warps=max(1, WARPS * block // BLOCK_WORDS),
        PAGES=num_pages,
        WORDS=words,
        BLOCK=block,
    )
