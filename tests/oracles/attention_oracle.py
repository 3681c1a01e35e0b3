"""Attention in numpy float64, one query at a time over the keys it may see. No pages, no masks, no running sums."""

from __future__ import annotations

import numpy as np


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """q [n, H, D], the last n tokens of k, v [length, K, D] -> float64 [n, H, D]."""
    num_queries, heads, dim = q.shape
    length, kv_heads, _ = k.shape
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scale = dim**-0.5 if scale is None else scale
    out = np.zeros_like(q)
    for i in range(num_queries):
        end = length - num_queries + i + 1
        begin = max(0, end - window) if window else 0
        for h in range(heads):
            kv = h // (heads // kv_heads)
            scores = k[begin:end, kv] @ q[i, h] * scale
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            logits = scores if sinks is None else np.append(scores, float(sinks[h]))
            weights = np.exp(logits - logits.max())
            weights /= weights.sum()
            out[i, h] = weights[: end - begin] @ v[begin:end, kv]
    return out
