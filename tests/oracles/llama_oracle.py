"""A Llama forward pass in numpy float64: whole sequences, no pages, no batching, Hugging Face tensor names.

Written from the published formulas and apart from the model's own code: separate q, k and v, repeated KV heads, one
full softmax, rotary tables by complex multiplication.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def rotate(x: np.ndarray, positions: np.ndarray, inv_freq: np.ndarray, factor: float = 1.0) -> np.ndarray:
    """x [T, heads, D]: the pair (i, i + D/2) is a complex number turned by position * inv_freq[i]."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * factor * np.exp(1j * positions[:, None] * inv_freq)[:, None, :]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def inverse_frequencies(
    head_dim: int, theta: float, scaling: Mapping | None, max_positions: int
) -> tuple[np.ndarray, float]:
    """(inv_freq [D/2], attention factor), one frequency at a time."""
    base = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    if kind == "default":
        return np.array(base), 1.0
    factor, context = scaling["factor"], scaling.get("original_max_position_embeddings", max_positions)
    if kind == "linear":
        return np.array([f / factor for f in base]), 1.0
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        out = []
        for f in base:
            wavelength = 2 * math.pi / f
            if wavelength < context / high:
                out.append(f)
            elif wavelength > context / low:
                out.append(f / factor)
            else:
                smooth = (context / wavelength - low) / (high - low)
                out.append((1 - smooth) * f / factor + smooth * f)
        return np.array(out), 1.0
    assert kind == "yarn", kind

    def index_of(turns: float) -> float:  # where theta^(-2i/D) * context = 2 pi turns
        return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(index_of(scaling.get("beta_fast", 32))), 0)
    last = min(math.ceil(index_of(scaling.get("beta_slow", 1))), head_dim - 1)
    out = []
    for i, f in enumerate(base):
        ramp = min(max((i - first) / (last - first), 0), 1)  # 0: kept, 1: interpolated
        out.append(f * (1 - ramp) + f / factor * ramp)
    return np.array(out), scaling.get("attention_factor") or 0.1 * math.log(factor) + 1


def forward(spec, tensors: Mapping[str, np.ndarray], token_ids: list[int]) -> np.ndarray:
    """Logits [T, V] of one sequence."""
    w = {name: np.asarray(array, np.float64) for name, array in tensors.items()}
    heads, kv_heads, dim, length = spec.num_heads, spec.num_kv_heads, spec.head_dim, len(token_ids)
    positions = np.arange(length)
    inv_freq, factor = inverse_frequencies(dim, spec.rope_theta, spec.rope_scaling, spec.max_position_embeddings)
    x = w["model.embed_tokens.weight"][token_ids]

    def project(x: np.ndarray, name: str) -> np.ndarray:
        y = x @ w[f"{name}.weight"].T
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    for i in range(spec.num_layers):
        layer = f"model.layers.{i}"
        h = rms_norm(x, w[f"{layer}.input_layernorm.weight"], spec.norm_eps)
        q = project(h, f"{layer}.self_attn.q_proj").reshape(length, heads, dim)
        k = project(h, f"{layer}.self_attn.k_proj").reshape(length, kv_heads, dim)
        v = project(h, f"{layer}.self_attn.v_proj").reshape(length, kv_heads, dim)
        if f"{layer}.self_attn.q_norm.weight" in w:
            q = rms_norm(q, w[f"{layer}.self_attn.q_norm.weight"], spec.norm_eps)
            k = rms_norm(k, w[f"{layer}.self_attn.k_norm.weight"], spec.norm_eps)
        q, k = rotate(q, positions, inv_freq, factor), rotate(k, positions, inv_freq, factor)
        k, v = np.repeat(k, heads // kv_heads, axis=1), np.repeat(v, heads // kv_heads, axis=1)
        scores = np.einsum("thd,shd->hts", q, k) * dim**-0.5
        visible = positions[None, :] <= positions[:, None]
        if spec.windows and spec.windows[i]:
            visible &= positions[None, :] > positions[:, None] - spec.windows[i]
        scores = np.where(visible[None], scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + project(np.einsum("hts,shd->thd", weights, v).reshape(length, -1), f"{layer}.self_attn.o_proj")
        h = rms_norm(x, w[f"{layer}.post_attention_layernorm.weight"], spec.norm_eps)
        gate, up = project(h, f"{layer}.mlp.gate_proj"), project(h, f"{layer}.mlp.up_proj")
        x = x + project(gate / (1 + np.exp(-gate)) * up, f"{layer}.mlp.down_proj")
    x = rms_norm(x, w["model.norm.weight"], spec.norm_eps)
    head = w["model.embed_tokens.weight"] if spec.tie_word_embeddings else w["lm_head.weight"]
    return (x @ head.T)[:, : spec.vocab_size]
