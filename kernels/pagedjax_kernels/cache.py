"""The KV pages: one array stacked over layers, so that a layer scan can carry it and update it in place."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax_kernels.compat import storage_dtype
from pagedjax_kernels.hardware import current_hardware

LANE = 128
"""Head dims that are no multiple of 64 are stored padded to this: 80 and 96 become 128."""

MAX_HEAD_DIM = 256
MAX_PAGE_SIZE = 256
PLATFORMS = ("cpu", "gpu", "tpu")
FLOAT_DTYPES = ("float32", "bfloat16", "float16")
QUANTIZED_DTYPES = ("int8", "float8_e4m3fn")
# The largest magnitude that a quantised page holds: a token's head is scaled so that its largest element gets it.
QUANTIZED_MAX = {"int8": 127.0, "float8_e4m3fn": 448.0}
_BITS = {"uint16": "bfloat16", "uint8": "float8_e4m3fn"}


@jax.tree_util.register_static
class Layout(enum.Enum):
    """How a slot's keys and values lie in `kv_pages`: static, a node without leaves in the cache's pytree."""

    ROWS = "rows"
    """K and V of a head in rows of their own, [2K, D]."""
    PAIRS = "pairs"
    """K and V of a head side by side in one row, [K, 2D]: on TPUs, whose rows are 128 wide, for head dims up to 64."""


LAYOUT_REFUSED = "the pages lie as on TPUs: allocate them for this platform"


class KVCache(NamedTuple):
    """Keys and values of every layer. A plain pytree: callers donate it to the jitted step and keep what comes back.

    Attributes:
      kv_pages: [L, N, S, 2K, D]. The head axis is interleaved: index 2k holds K of KV head k, index 2k+1 its V, so that
        sharding that axis keeps pairs together. D is the padded head dim; the padding is zero in every written slot.
        Layout.PAIRS: [L, N, S, K, 2D], K of a head and then its V, which is the same order of elements.
        uint16 holds the bits of bfloat16 and uint8 those of float8_e4m3fn, where XLA does not update those in place.
      scales: f32[L, N, S, 2K] for int8 and float8_e4m3fn pages (value = page element * scale), else None. On TPUs
        f32[L, N, X, 128], see `scales_shape`; `page_scales` reads both.
      layout: how kv_pages is to be read.
    """

    kv_pages: jax.Array
    scales: jax.Array | None = None
    layout: Layout = Layout.ROWS

    @property
    def paired(self) -> bool:
        return self.layout is Layout.PAIRS

    @property
    def packed_scales(self) -> bool:
        """Whether a page's scales lie in rows of 128. (Where both shapes are one, 2K = 128 and X = S, so are the contents.)"""
        return self.scales is not None and self.scales.shape[2:] != (self.page_size, 2 * self.num_kv_heads)

    @property
    def dtype(self) -> Any:
        """What the pages hold: float32, bfloat16, float16, int8 or float8_e4m3fn."""
        return jnp.dtype(_BITS.get(self.kv_pages.dtype.name, self.kv_pages.dtype.name))

    @property
    def num_layers(self) -> int:
        return self.kv_pages.shape[0]

    @property
    def num_pages(self) -> int:
        return self.kv_pages.shape[1]

    @property
    def page_size(self) -> int:
        return self.kv_pages.shape[2]

    @property
    def num_kv_heads(self) -> int:
        return self.kv_pages.shape[3] // (1 if self.paired else 2)

    @property
    def head_dim(self) -> int:
        return self.kv_pages.shape[4] // (2 if self.paired else 1)


def page_layout(head_dim: int, platform: str) -> Layout:
    """The layout that suits a platform ("cpu", "gpu" or "tpu")."""
    return Layout.PAIRS if platform == "tpu" and head_dim <= LANE // 2 else Layout.ROWS


def padded_head_dim(head_dim: int, platform: str = "cpu") -> int:
    """The head dim that the pages are allocated with on a platform.

    On TPUs 64 (the half of a row) or a multiple of 128; elsewhere multiples of 64 (and small powers of two) as they are,
    the rest padded to a multiple of 128.
    """
    if platform == "tpu" and head_dim <= LANE // 2:
        return LANE // 2
    if platform != "tpu" and (head_dim % 64 == 0 or head_dim in (8, 16, 32)):
        return head_dim
    return -(-head_dim // LANE) * LANE


def slot_stride(num_kv_heads: int) -> int:
    """Scales from one slot to the next in rows of 128: 2K, rounded up to a power of two, so that no slot is cut."""
    return 1 << (2 * num_kv_heads - 1).bit_length()


def scales_shape(page_size: int, num_kv_heads: int, platform: str) -> tuple[int, int]:
    """(S, 2K) of a page's scales; on TPUs (X, 128), slot after slot, `slot_stride` apart.

    XLA would keep [.., S, 2K] on a TPU with the pages along the lanes, where a page cannot be copied as a whole. Rows are
    a tile's: 1, 2, 4 or a multiple of 8. More than 64 KV heads stay as they are; no TPU kernel reads them.
    """
    stride = slot_stride(num_kv_heads)
    if platform != "tpu" or stride > LANE:
        return page_size, 2 * num_kv_heads
    rows = -(-page_size * stride // LANE)
    return next((n for n in (1, 2, 4) if n >= rows), -(-rows // 8) * 8), LANE


def page_scales(x: jax.Array, cache: KVCache) -> jax.Array:
    """Scales of some pages as they are kept, [.., S, 2K] or [.., X, 128] -> [.., S, 2K]."""
    if not cache.packed_scales:
        return x
    size, stride = cache.page_size, slot_stride(cache.num_kv_heads)
    x = x.reshape(*x.shape[:-2], -1)[..., : size * stride]
    return x.reshape(*x.shape[:-1], size, stride)[..., : 2 * cache.num_kv_heads]


def init_cache(
    num_layers: int,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: Any = jnp.bfloat16,
    *,
    platform: str | None = None,
) -> KVCache:
    """Allocates zeroed pages.

    Args:
      num_layers: L.
      num_pages: N physical pages, page 0 (the null page, that nobody owns) among them.
      page_size: S slots a page, 1 to 256.
      num_kv_heads: K.
      head_dim: the model's head dim, at most 256; 80 and 96 are stored as 128.
      dtype: float32, bfloat16, float16, int8 or float8_e4m3fn.
      platform: "cpu", "gpu" or "tpu", whose layout and padding the pages get; None: where the pages are allocated. Every
        op takes pages of every platform, or says why not.

    Returns:
      KVCache with kv_pages [L, N, S, 2K, D], or [L, N, S, K, 128] in Layout.PAIRS (on TPUs, for head dims up to 64), and,
      for int8 and float8_e4m3fn, scales f32[L, N, S, 2K] (on TPUs [L, N, X, 128]).

    Raises:
      ValueError: an argument out of range; names it, its value and the limit.
    """
    for name, value in (("num_layers", num_layers), ("num_pages", num_pages), ("num_kv_heads", num_kv_heads)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not 1 <= page_size <= MAX_PAGE_SIZE:
        raise ValueError(f"page_size must be in [1, {MAX_PAGE_SIZE}], got {page_size}")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be in [1, {MAX_HEAD_DIM}], got {head_dim}")
    # Slots are int32, and padded writes need distinct slots above N*S: half the range is left to them.
    if num_pages * page_size > 2**30:
        raise ValueError(f"num_pages * page_size must be at most 2**30 slots, got {num_pages} * {page_size}")
    if platform not in (None, *PLATFORMS):
        raise ValueError(f"platform must be None or one of {', '.join(PLATFORMS)}, got {platform!r}")
    platform = platform or current_hardware().platform
    name = jnp.dtype(dtype).name
    if name not in FLOAT_DTYPES + QUANTIZED_DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(FLOAT_DTYPES + QUANTIZED_DTYPES)}, got {name}")
    layout, dim = page_layout(head_dim, platform), padded_head_dim(head_dim, platform)
    pages = (num_layers, num_pages)
    row = (num_kv_heads, 2 * dim) if layout is Layout.PAIRS else (2 * num_kv_heads, dim)
    scales = None
    if name in QUANTIZED_DTYPES:
        scales = jnp.zeros((*pages, *scales_shape(page_size, num_kv_heads, platform)), jnp.float32)
    return KVCache(jnp.zeros((*pages, page_size, *row), storage_dtype(name, platform)), scales, layout)


def slots_minor(rows: int, dtype: Any) -> bool:
    """Whether XLA lays pages [.., S, rows, 128 or more] out on a TPU with the slots inside: [.., rows, S, W].

    Rows of a slot that fill tiles of 2, 4 or 8, and whole 32-bit words, lie beside one another. Other numbers of them
    would be padded, so the slots lie there. Found in compiled programs; scripts/compile_kernels.py sees where it no longer
    holds.
    """
    words = 4 // jnp.dtype(dtype).itemsize  # rows in the 32 bits of a sublane
    return rows % 8 != 0 and (rows not in (2, 4) or rows < words)


def to_storage(x: jax.Array, cache: KVCache) -> jax.Array:
    """Elements of cache.dtype -> as kv_pages keeps them."""
    return x if cache.kv_pages.dtype == x.dtype else lax.bitcast_convert_type(x, cache.kv_pages.dtype)


def from_storage(x: jax.Array, cache: KVCache) -> jax.Array:
    """What was read from kv_pages -> elements of cache.dtype. Not for all pages: it would copy them."""
    return x if cache.kv_pages.dtype == cache.dtype else lax.bitcast_convert_type(x, cache.dtype)
