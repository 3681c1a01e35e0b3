"""The public op: argument checks, then the backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pagedjax_kernels import dispatch
from pagedjax_kernels.cache import KVCache
from pagedjax_kernels.copy_pages.reference import copy_pages_reference
from pagedjax_kernels.copy_pages.triton import CopyCase, copy_pages_triton, why_not_triton
from pagedjax_kernels.copy_pages.xla import copy_pages_xla

BACKENDS = (
    dispatch.Backend("triton", why_not_triton, copy_pages_triton),
    dispatch.Backend("xla", lambda hardware, case: None, copy_pages_xla),
    dispatch.Backend("reference", lambda hardware, case: None, copy_pages_reference, automatic=False),
)


def copy_pages(cache: KVCache, src: jax.Array, dst: jax.Array, *, backend: str = "auto") -> KVCache:
    """Copies pages src[i] -> dst[i] of all layers, in place where the cache is donated.

    Costs what is really copied: a call in which every dst is padding costs next to nothing.

    Args:
      cache: pages [L, N, S, 2K, D].
      src: i32[C] pages to copy from, in [0, N). Where dst is padding, anything in range.
      dst: i32[C] pages to copy to; those < N are distinct, and none of them is also copied from. dst >= N (padding)
        is dropped. Never negative.
      backend: "auto", "triton", "xla" or "reference".

    Returns:
      The updated cache.

    Raises:
      ValueError: src and dst are not two i32[C].
      NotImplementedError: the named backend cannot serve this call; says why.
    """
    if src.ndim != 1 or src.shape != dst.shape:
        raise ValueError(f"src and dst must both be [C], got {src.shape} and {dst.shape}")
    if src.dtype != jnp.int32 or dst.dtype != jnp.int32:
        raise ValueError(f"src and dst must be int32, got {src.dtype} and {dst.dtype}")
    pages = cache.kv_pages
    page_bytes = pages.size // (pages.shape[0] * pages.shape[1]) * pages.dtype.itemsize
    case = CopyCase(cache.dtype.name, page_bytes, pages.shape[0])
    return dispatch.pick("copy_pages", BACKENDS, backend, case).run(cache, src, dst)
