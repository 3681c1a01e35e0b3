"""Paged attention for NVIDIA GPUs (sm80 and newer) through jax-triton: what is launched, in which shapes.

The kernels are in triton_kernels.py, which imports triton; here everything of triton is imported at first use.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pagedjax_kernels import triton_call, tuning
from pagedjax_kernels.cache import FLOAT_DTYPES, LAYOUT_REFUSED, QUANTIZED_DTYPES, KVCache
from pagedjax_kernels.hardware import Hardware
from pagedjax_kernels.paged_attention.case import AttentionCase


class Tiling(NamedTuple):
    """Attributes:
    block_m: rows of a tile, each one head of one query.
    block_n: keys that are read at once.
    warps, stages: of a program.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int


class DecodeTiling(NamedTuple):
    """Attributes:
    block_m, block_n, warps, stages: as in Tiling.
    splits: of a row, at most: what they hand to the reduction is B * H * splits * (D + 2) floats in memory.
    min_span: the fewest keys of a split, a multiple of block_n.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    splits: int
    min_span: int


def why_not_triton(hardware: Hardware, case: AttentionCase) -> str | None:
    """The reason why this backend cannot serve, or None."""
    reason = triton_call.why_not_here(hardware, case.kv_dtype)
    if reason is not None:
        return reason
    if case.paired or case.packed_scales:
        return LAYOUT_REFUSED
    if case.q_dtype not in FLOAT_DTYPES:
        return f"queries must be {', '.join(FLOAT_DTYPES)}, got {case.q_dtype}"
    if case.head_dim % 16 or not 16 <= case.head_dim <= 256:
        return f"the head dim must be a multiple of 16, 16 to 256, got {case.head_dim}"
    group = case.num_heads // case.num_kv_heads
    limit = _prefill_heuristics(case).block_m  # a tile takes at least one query
    if group > limit:
        return f"at most {limit} query heads per KV head for {case.q_dtype} over {case.kv_dtype}, got {group}"
    return triton_call.why_not_installed()


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def _in_f32(case: AttentionCase) -> bool:
    """Whether products are taken in float32. 16-bit queries take quantised pages in their own dtype: an int8 or float8
    element fits both 16-bit types exactly."""
    return case.q_dtype == "float32" or (case.kv_dtype in FLOAT_DTYPES and case.kv_dtype != case.q_dtype)


def _stages(case: AttentionCase) -> int:
    """Triton takes two stages for a look-up and two for what it points to: with five, pages are copied to shared memory a
    whole step ahead of the products, with three right behind the last ones. Wide heads would not fit in 99 KiB with five.
    Without tensor cores it keeps a second stage in registers."""
    if _in_f32(case):
        return 1
    return 5 if case.head_dim <= 128 else 3


def _plain(case: AttentionCase) -> bool:
    """Pages that go to the tensor cores as they are: to widen or to mask elements takes registers."""
    return case.kv_dtype not in QUANTIZED_DTYPES and case.head_dim == _power_of_two(case.head_dim)


def decode_tiling(case: AttentionCase) -> DecodeTiling:
    """Measured on this device, or: bandwidth is all, so enough bytes in flight, and several programs on an SM."""
    group = _power_of_two(case.num_heads // case.num_kv_heads)
    rows = max(16, group)  # tl.dot wants 16
    if _in_f32(case):
        keys, warps = 32 if case.head_dim <= 64 else 16, 8
    else:
        keys, warps = 64 if case.head_dim <= 64 and _plain(case) else 32, 4 if rows <= 32 else 8
    # A split writes and reads 8 bytes per head and element, which with 16-bit pages is at most 3 % of what it reads of
    # them: 2 * G / span.
    tiling = DecodeTiling(rows, keys, warps, _stages(case), splits=32, min_span=64 * max(4, group))
    return tuning.configured("triton.decode", case.shape_class, tiling)


def _prefill_heuristics(case: AttentionCase) -> Tiling:
    """Keys and values are shared by as many queries as registers allow."""
    if _in_f32(case):
        return Tiling(32, 32 if case.head_dim <= 64 else 16, 8, _stages(case))
    narrow = case.head_dim <= 128
    if case.kv_dtype in QUANTIZED_DTYPES:
        return Tiling(64, 32 if narrow else 16, 8, 3)
    keys = 64 if 64 < case.head_dim <= 128 and _plain(case) else 32
    return Tiling(128 if narrow else 64, keys, 8, _stages(case))


def prefill_tiling(case: AttentionCase) -> Tiling:
    """Measured on this device, or what heuristics say."""
    return tuning.configured("triton.prefill", case.shape_class, _prefill_heuristics(case))


def constants(cache: KVCache, case: AttentionCase, tiling: Tiling | DecodeTiling) -> dict[str, Any]:
    """What both attention kernels are specialised on."""
    return {
        "HEADS": case.num_heads,
        "KV_HEADS": case.num_kv_heads,
        "D": case.head_dim,
        "PAGE_D": cache.head_dim,
        "PAGE": case.page_size,
        "PAGES": cache.num_pages,
        "MAX_PAGES": case.max_pages,
        "SCALE": case.scale,
        "SOFT_CAP": case.soft_cap or 0.0,
        "WINDOWED": case.window != "none",
        "QUANTIZED": cache.scales is not None,
        "IN_F32": _in_f32(case),
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
        "BLOCK_D": _power_of_two(case.head_dim),
    }


launch = functools.partial(triton_call.launch, "pagedjax_kernels.paged_attention.triton_kernels")
"""Calls a kernel of triton_kernels.py by name. Tests put the interpreter here."""


def _decode(
    q: jax.Array,
    pages: tuple[KVCache, jax.Array, jax.Array],
    kv_lens: jax.Array,
    tokens: jax.Array,
    window: jax.Array,
    sinks: jax.Array,
    case: AttentionCase,
) -> jax.Array:
    """One query a row: q [T, H, D], kv_lens i32[B] (0: the row takes no part), tokens i32[B] -> [B, H, D]."""
    cache, layer, table = pages
    rows, heads, dim = table.shape[0], case.num_heads, case.head_dim
    tiling = decode_tiling(case)
    shared: dict[str, Any] = {
        "SPLITS": min(tiling.splits, -(-case.max_pages * case.page_size // tiling.min_span)),
        "MIN_SPAN": tiling.min_span,
    }
    splits = (rows, heads, shared["SPLITS"])
    partial = launch(
        "decode_kernel",
        *(q, cache.kv_pages, _or(cache.scales, kv_lens), layer, table, kv_lens, tokens, window),
        out_shape=[jax.ShapeDtypeStruct(s, jnp.float32) for s in ((*splits, dim), splits, splits)],
        grid=(case.num_kv_heads, rows, shared["SPLITS"]),
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **shared,
        **constants(cache, case, tiling),
    )
    return launch(
        "reduce_kernel",
        *(*partial, kv_lens, window, sinks),
        out_shape=jax.ShapeDtypeStruct((rows, heads, dim), q.dtype),
        grid=(heads, rows),
        num_warps=4 if dim <= 128 else 8,
        HEADS=heads,
        D=dim,
        WINDOWED=case.window != "none",
        SINKS=case.sinks,
        BLOCK_N=tiling.block_n,
        # Not as many as there are: the order of the sum would then depend on the page table's width.
        BLOCK_S=tiling.splits,
        BLOCK_D=_power_of_two(dim),
        **shared,
    )


def tiles_of(q_lens: jax.Array, block: int, num_tiles: int) -> tuple[jax.Array, jax.Array]:
    """The tiles of rows with more than one query.

    Args:
      q_lens: i32[B]. block: queries in a tile. num_tiles: as many as there may be.

    Returns:
      i32[num_tiles] rows (B: no tile) and i32[num_tiles] their first queries, counted from the row's first.
    """
    count = jnp.where(q_lens > 1, (q_lens + block - 1) // block, 0)
    ends = jnp.cumsum(count).astype(jnp.int32)
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    rows = jnp.searchsorted(ends, tile, side="right").astype(jnp.int32)
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    return rows, (tile - before[rows]) * block


def _prefill(
    q: jax.Array,
    pages: tuple[KVCache, jax.Array, jax.Array],
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    window: jax.Array,
    sinks: jax.Array,
    case: AttentionCase,
) -> jax.Array:
    """Rows with more than one query -> [T, H, D], zeros for all other tokens."""
    cache, layer, table = pages
    tiling = prefill_tiling(case)
    block = tiling.block_m // (case.num_heads // case.num_kv_heads)
    # Full tiles, and one more for every row that takes part: two queries at least.
    num_tiles = case.num_tokens // block + min(case.num_rows, case.num_tokens // 2)
    if num_tiles == 0:
        return jnp.zeros_like(q)
    rows, starts = tiles_of(cu_q_lens[1:] - cu_q_lens[:-1], block, num_tiles)
    return launch(
        "prefill_kernel",
        *(q, cache.kv_pages, _or(cache.scales, kv_lens), layer, table, kv_lens, cu_q_lens, rows, starts, window, sinks),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(case.num_kv_heads, num_tiles),
        zeroed=True,
        ROWS=case.num_rows,
        SINKS=case.sinks,
        BLOCK_Q=block,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **constants(cache, case, tiling),
    )


def _or(array: jax.Array | None, other: jax.Array) -> jax.Array:
    """The array, or one that a kernel that has no use for it is given in its place."""
    return other if array is None else array


def paged_attention_triton(
    q: jax.Array,
    cache: KVCache,
    layer: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    window: jax.Array | None,
    sinks: jax.Array | None,
    case: AttentionCase,
) -> jax.Array:
    """See paged_attention.

    Rows with one query are split along their keys (`decode_kernel`, then `reduce_kernel`); rows with more go through
    `prefill_kernel` in tiles. A row's splits and tiles follow from its own lengths alone: batch mates do not change a
    bit of it.
    """
    some_window = _or(window, kv_lens).reshape(-1)
    some_sinks = _or(sinks, kv_lens)
    pages = (cache, layer.reshape(1), page_table)
    if case.max_q_len == 1:
        tokens = jnp.arange(case.num_rows, dtype=jnp.int32)
        return _decode(q, pages, kv_lens, tokens, some_window, some_sinks, case)
    single = cu_q_lens[1:] - cu_q_lens[:-1] == 1
    tokens = jnp.minimum(cu_q_lens[:-1], case.num_tokens - 1)
    out = _prefill(q, pages, kv_lens, cu_q_lens, some_window, some_sinks, case)
    rows = _decode(q, pages, jnp.where(single, kv_lens, 0), tokens, some_window, some_sinks, case)
    return out.at[jnp.where(single, tokens, case.num_tokens)].set(rows, mode="drop")
