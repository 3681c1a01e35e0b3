"""Rotary position embeddings (Su et al., 2021) and the scalings that long-context checkpoints use.

The frequencies are a few numbers computed once in float64 on the host; angles come from the positions inside the step,
in float32, so there is no table as long as the context.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class RotaryTable(NamedTuple):
    """Attributes:
    inv_freq: D/2 radians per position, as a tuple of Python floats (static, hashable); an array where layers of one
      scan differ.
    attention_factor: what cos and sin are multiplied by (YaRN; else 1).
    """

    inv_freq: tuple[float, ...] | jax.Array
    attention_factor: float | jax.Array = 1.0


def rotary_table(head_dim: int, theta: float, scaling: Mapping[str, Any] | None, max_positions: int) -> RotaryTable:
    """The frequencies of a model.

    Args:
      head_dim: D, even.
      theta: the base (`rope_theta`).
      scaling: a Hugging Face `rope_scaling` dict or None. Its kind is under `rope_type` or, in older files, `type`:
        - default: none.
        - linear: positions are divided by `factor` (Chen et al., 2023).
        - llama3: slow frequencies are divided by `factor`, fast ones kept, a ramp between `low_freq_factor` and
          `high_freq_factor` turns per `original_max_position_embeddings` (Llama 3.1's published code).
        - yarn: NTK-by-parts with `beta_fast`, `beta_slow`, and cos and sin scaled by an attention factor
          (Peng et al., 2023).
      max_positions: the model's `max_position_embeddings`; the original context where the scaling does not name it.

    Raises:
      ValueError: an unknown kind, or a missing or bad number; names it.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim must be even for rotary embeddings, got {head_dim}")
    inv_freq = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    kind = rope_type(scaling)
    if kind == "default" or scaling is None:
        return RotaryTable(tuple(inv_freq.tolist()))
    # YaRN files may leave the factor to the ratio of the two context lengths.
    context = _number(scaling, "original_max_position_embeddings", max_positions)
    factor = _number(scaling, "factor", max_positions / context if kind == "yarn" else None)
    if kind == "linear":
        return RotaryTable(tuple((inv_freq / factor).tolist()))
    if kind == "llama3":
        return RotaryTable(tuple(_llama3(inv_freq, factor, context, scaling).tolist()))
    return _yarn(inv_freq, theta, factor, context, scaling)


def rope_type(scaling: Mapping[str, Any] | None) -> str:
    """The kind of a `rope_scaling` dict, under either spelling of its key. ValueError names an unknown one."""
    if not scaling:
        return "default"
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope_scaling: rope_type must be one of {', '.join(ROPE_TYPES)}; got {kind!r}")
    return kind


def apply_rotary(x: jax.Array, positions: jax.Array, table: RotaryTable) -> jax.Array:
    """Rotates x [T, heads, D] by positions i32[T]; in float32, returned in x's dtype.

    Hugging Face's convention: element i is paired with i + D/2, so a checkpoint's projections are used as they are.
    """
    half = x.shape[-1] // 2
    angle = positions.astype(jnp.float32)[:, None] * jnp.asarray(table.inv_freq, jnp.float32)[None, :]
    cos = (jnp.cos(angle) * jnp.float32(table.attention_factor))[:, None, :]
    sin = (jnp.sin(angle) * jnp.float32(table.attention_factor))[:, None, :]
    f = x.astype(jnp.float32)
    a, b = f[..., :half], f[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _number(scaling: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = scaling.get(key)
    if value is None:
        if default is None:
            raise ValueError(f"rope_scaling of type {rope_type(scaling)!r} needs {key!r}, got {dict(scaling)!r}")
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"rope_scaling: {key} must be a positive number, got {value!r}")
    return float(value)


def _llama3(inv_freq: np.ndarray, factor: float, context: float, scaling: Mapping[str, Any]) -> np.ndarray:
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    if high <= low:
        raise ValueError(f"rope_scaling: high_freq_factor must be above low_freq_factor = {low:g}, got {high:g}")
    turns = context * inv_freq / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return keep * inv_freq + (1 - keep) * inv_freq / factor


def _yarn(inv_freq: np.ndarray, theta: float, factor: float, context: float, scaling: Mapping[str, Any]) -> RotaryTable:
    dim = 2 * len(inv_freq)
    fast, slow = _number(scaling, "beta_fast", 32), _number(scaling, "beta_slow", 1)

    def dimension(turns: float) -> float:
        """The (fractional) frequency index that makes so many turns over the original context."""
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(fast), dimension(slow)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    inv_freq = inv_freq / factor * ramp + inv_freq * (1 - ramp)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        attention = _number(scaling, "attention_factor")
    elif scaling.get("mscale") and scaling.get("mscale_all_dim"):
        attention = magnitude(_number(scaling, "mscale")) / magnitude(_number(scaling, "mscale_all_dim"))
    else:
        attention = magnitude(1.0)
    return RotaryTable(tuple(inv_freq.tolist()), attention)
