"""The public op: what every argument is, static checks, then the backend."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from pagedjax_kernels import dispatch, native_cpu
from pagedjax_kernels.cache import LAYOUT_REFUSED, KVCache
from pagedjax_kernels.hardware import Hardware
from pagedjax_kernels.paged_attention.case import AttentionCase
from pagedjax_kernels.paged_attention.pallas_gpu_limits import why_not_pallas_gpu
from pagedjax_kernels.paged_attention.pallas_gpu_triton import (
    paged_attention_pallas_gpu_triton,
    why_not_pallas_gpu_triton,
)
from pagedjax_kernels.paged_attention.pallas_tpu_limits import why_not_pallas_tpu
from pagedjax_kernels.paged_attention.reference import paged_attention_reference
from pagedjax_kernels.paged_attention.triton import paged_attention_triton, why_not_triton
from pagedjax_kernels.paged_attention.xla import paged_attention_xla


def _why_not_native(hardware: Hardware, case: AttentionCase) -> str | None:
    if hardware.platform != "cpu":
        return "for CPUs only"
    if case.q_dtype not in native_cpu.ACTIVATIONS:
        return f"queries must be {', '.join(native_cpu.ACTIVATIONS)}, got {case.q_dtype}"
    if case.packed_scales:
        return LAYOUT_REFUSED
    return native_cpu.why_not()


def _run_pallas_gpu(*args):
    from pagedjax_kernels.paged_attention.pallas_gpu import paged_attention_pallas_gpu  # 0.2 s, for GPUs only

    return paged_attention_pallas_gpu(*args)


def _run_pallas_tpu(*args):
    from pagedjax_kernels.paged_attention.pallas_tpu import paged_attention_pallas_tpu  # 0.2 s, for TPUs only

    return paged_attention_pallas_tpu(*args)


BACKENDS = (
    dispatch.Backend("native_cpu", _why_not_native, native_cpu.paged_attention_native),
    dispatch.Backend("triton", why_not_triton, paged_attention_triton),
    dispatch.Backend("pallas_gpu", why_not_pallas_gpu, _run_pallas_gpu, automatic=False),
    dispatch.Backend(
        "pallas_gpu_triton", why_not_pallas_gpu_triton, paged_attention_pallas_gpu_triton, automatic=False
    ),
    dispatch.Backend("pallas_tpu", why_not_pallas_tpu, _run_pallas_tpu),
    dispatch.Backend("xla", lambda hardware, case: None, paged_attention_xla),
    dispatch.Backend("reference", lambda hardware, case: None, paged_attention_reference, automatic=False),
)


def paged_attention(
    q: jax.Array,
    cache: KVCache,
    layer: jax.Array | int,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    window: jax.Array | int | None = None,
    sinks: jax.Array | None = None,
    max_q_len: int | None = None,
    backend: str = "auto",
) -> jax.Array:
    """Causal attention of ragged queries over keys and values in pages.

    Row b's queries are q[cu_q_lens[b]:cu_q_lens[b+1]]; they are the *last* tokens of its kv_lens[b], whose keys and
    values (this step's included) are already in the pages: call kv_update first. A query at position p of its row
    attends to positions [0, p], or to (p - window, p] with a window. Softmax and sums are in float32.

    What no row owns is never read into a result: NaN in foreign, unwritten or padded slots does not reach an output. A
    row's output does not depend on the other rows.

    Args:
      q: [T, H, D] float32, bfloat16 or float16. Query head h reads KV head h // (H // K).
      cache: pages [L, N, S, 2K, Dc] or, in pairs, [L, N, S, K, 2 Dc], Dc >= D (see KVCache); int8 and float8_e4m3fn pages
        carry scales.
      layer: i32 scalar, static or traced, in [0, L).
      page_table: i32[B, P], the physical page of every logical page of the rows in this call. Entries beyond a row's
        length, and those that the window hides from all of its queries, are not used, but must be in [0, N).
      kv_lens: i32[B] tokens of every row, at most P * S; 0 for an empty row.
      cu_q_lens: i32[B+1], cu_q_lens[0] = 0, not decreasing, cu_q_lens[B] <= T; a row has at most kv_lens[b] queries.
      scale: static factor on q . k; None: D ** -0.5.
      soft_cap: static c > 0: scores become c * tanh(score / c), after the scale. None: off.
      window: number of positions a query sees, itself included; a static int or an i32 scalar array (it may differ by
        layer in a layer scan). None or 0: all.
      sinks: f32[H], a logit per head that takes part in the softmax and has no value (attention sinks). None: off.
      max_q_len: static bound on the queries of a row. 1 promises pure decode with T == B: query b is row b's (rows
        with kv_lens 0 are empty), and the prefill path is not compiled. None: no bound.
      backend: "auto", "native_cpu", "triton", "pallas_gpu", "pallas_gpu_triton", "pallas_tpu", "xla" or "reference". A
        named one serves or raises, it never falls back.

    Returns:
      [T, H, D] in q's dtype. Zeros for tokens from cu_q_lens[B] on and for queries with nothing to attend.

    Raises:
      ValueError: a static argument that cannot be right; names it, its value and the limit.
      NotImplementedError: the backend cannot serve this call; says why.
    """
    case = _checked(q, cache, page_table, kv_lens, cu_q_lens, scale, soft_cap, window, sinks, max_q_len)
    chosen = dispatch.pick("paged_attention", BACKENDS, backend, case)
    if case.window == "none":
        window = None
    else:
        window = jnp.asarray(window, jnp.int32)
    return chosen.run(q, cache, jnp.asarray(layer, jnp.int32), page_table, kv_lens, cu_q_lens, window, sinks, case)


def _checked(q, cache, page_table, kv_lens, cu_q_lens, scale, soft_cap, window, sinks, max_q_len) -> AttentionCase:
    if q.ndim != 3:
        raise ValueError(f"q must be [T, H, D], got shape {q.shape}")
    num_tokens, num_heads, dim = q.shape
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q must be floating point, got {q.dtype}")
    if num_heads % cache.num_kv_heads:
        raise ValueError(f"q has {num_heads} heads, not a multiple of the cache's {cache.num_kv_heads} KV heads")
    if dim > cache.head_dim:
        raise ValueError(f"q has head dim {dim}, the cache only {cache.head_dim}")
    if page_table.ndim != 2 or page_table.shape[1] < 1:
        raise ValueError(f"page_table must be [B, P] with P >= 1, got shape {page_table.shape}")
    num_rows = page_table.shape[0]
    if kv_lens.shape != (num_rows,):
        raise ValueError(f"kv_lens must be [B] = ({num_rows},) as page_table has it, got {kv_lens.shape}")
    if cu_q_lens.shape != (num_rows + 1,):
        raise ValueError(f"cu_q_lens must be [B+1] = ({num_rows + 1},) as page_table has it, got {cu_q_lens.shape}")
    for name, array in (("page_table", page_table), ("kv_lens", kv_lens), ("cu_q_lens", cu_q_lens)):
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32, got {array.dtype}")
    if max_q_len is not None and max_q_len < 1:
        raise ValueError(f"max_q_len must be at least 1, got {max_q_len}")
    if max_q_len == 1 and num_tokens != num_rows:
        raise ValueError(f"max_q_len=1 promises one query a row, got T={num_tokens} and B={num_rows}")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise ValueError(f"soft_cap must be positive, got {soft_cap}")
    if isinstance(window, int) and window < 0:
        raise ValueError(f"window must be at least 0 (0: full attention), got {window}")
    if window is not None and jnp.shape(window) != ():
        raise ValueError(f"window must be a scalar, got shape {jnp.shape(window)}")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks must be [H] = ({num_heads},), got {sinks.shape}")
    return AttentionCase(
        num_tokens=num_tokens,
        num_rows=num_rows,
        max_pages=page_table.shape[1],
        num_heads=num_heads,
        num_kv_heads=cache.num_kv_heads,
        head_dim=dim,
        page_head_dim=cache.head_dim,
        page_size=cache.page_size,
        q_dtype=jnp.dtype(q.dtype).name,
        kv_dtype=cache.dtype.name,
        max_q_len=max_q_len,
        scale=float(dim**-0.5 if scale is None else scale),
        soft_cap=None if soft_cap is None else float(soft_cap),
        window="none" if window is None or (isinstance(window, int) and window == 0) else "some",
        sinks=sinks is not None,
        paired=cache.paired,
        packed_scales=cache.packed_scales,
    )
