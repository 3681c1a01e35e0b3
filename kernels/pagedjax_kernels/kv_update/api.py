"""The public op: argument checks, then the backend."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pagedjax_kernels import dispatch, native_cpu
from pagedjax_kernels.cache import LAYOUT_REFUSED, KVCache
from pagedjax_kernels.hardware import Hardware
from pagedjax_kernels.kv_update.reference import kv_update_reference
from pagedjax_kernels.kv_update.xla import kv_update_xla, kv_update_xla_tpu


class UpdateCase(NamedTuple):
    """The static facts of one call: dtypes of the pages and of what is written, whether the scales lie as on TPUs."""

    kv_dtype: str
    dtype: str
    packed_scales: bool


def _why_not_native(hardware: Hardware, case: UpdateCase) -> str | None:
    if hardware.platform != "cpu":
        return "for CPUs only"
    if case.kv_dtype not in native_cpu.WRITABLE or case.dtype not in native_cpu.ACTIVATIONS:
        return f"it does not write {case.dtype} into {case.kv_dtype} pages"
    if case.packed_scales:
        return LAYOUT_REFUSED
    return native_cpu.why_not()


def _why_not_tpu(hardware: Hardware, case: UpdateCase) -> str | None:
    return None if hardware.platform == "tpu" else "for TPUs only"


BACKENDS = (
    dispatch.Backend("native_cpu", _why_not_native, native_cpu.kv_update_native),
    dispatch.Backend("xla_tpu", _why_not_tpu, kv_update_xla_tpu),
    dispatch.Backend("xla", lambda hardware, case: None, kv_update_xla),
    dispatch.Backend("reference", lambda hardware, case: None, kv_update_reference, automatic=False),
)


def kv_update(
    cache: KVCache,
    k: jax.Array,
    v: jax.Array,
    layer: jax.Array | int,
    slot_mapping: jax.Array,
    *,
    backend: str = "auto",
) -> KVCache:
    """Writes one layer's new keys and values into their slots, in place where the cache is donated.

    In one program, write before you read: a gather from the pages ahead of the write makes XLA copy all of them.

    Args:
      cache: pages [L, N, S, 2K, D] or, in pairs, [L, N, S, K, 2D] (see KVCache).
      k: [T, K, Dk] keys, Dk <= D (the rest of D is written as zero); cast, or quantised per token and head.
      v: [T, K, Dk] values.
      layer: i32 scalar, static or traced, in [0, L).
      slot_mapping: i32[T], slot = page * S + offset of every token. All distinct; slots >= N * S (padding) are
        dropped. Never negative.
      backend: "auto", "native_cpu", "xla_tpu", "xla" or "reference".

    Returns:
      The updated cache.

    Raises:
      ValueError: shapes that do not agree; names the argument, its value and what was expected.
    """
    if k.ndim != 3 or k.shape != v.shape:
        raise ValueError(f"k and v must both be [T, K, D], got {k.shape} and {v.shape}")
    if k.shape[1] != cache.num_kv_heads:
        raise ValueError(f"k has {k.shape[1]} KV heads, the cache {cache.num_kv_heads}")
    if k.shape[2] > cache.head_dim:
        raise ValueError(f"k has head dim {k.shape[2]}, the cache holds at most {cache.head_dim}")
    if slot_mapping.shape != k.shape[:1]:
        raise ValueError(f"slot_mapping must be [T] = ({k.shape[0]},), got {slot_mapping.shape}")
    if slot_mapping.dtype != jnp.int32:
        raise ValueError(f"slot_mapping must be int32, got {slot_mapping.dtype}")
    case = UpdateCase(cache.dtype.name, jnp.dtype(k.dtype).name, cache.packed_scales)
    chosen = dispatch.pick("kv_update", BACKENDS, backend, case)
    return chosen.run(cache, k, v, jnp.asarray(layer, jnp.int32), slot_mapping)
