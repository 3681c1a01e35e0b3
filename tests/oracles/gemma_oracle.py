"""A Gemma 3 forward pass in numpy float64: whole sequences, one query at a time, Hugging Face tensor names.

Written from the published description and apart from the model's own code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from tests.oracles.llama_oracle import inverse_frequencies, rotate


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * (1 + weight)


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def capped(x: np.ndarray, cap: float | None) -> np.ndarray:
    return x if cap is None else cap * np.tanh(x / cap)


def forward(spec, tensors: Mapping[str, np.ndarray], token_ids: list[int]) -> np.ndarray:
    """Logits [T, V] of one sequence."""
    w = {name: np.asarray(array, np.float64) for name, array in tensors.items()}
    heads, kv_heads, dim, eps = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.norm_eps
    length = len(token_ids)
    positions = np.arange(length)
    scale = dim**-0.5 if spec.query_scale is None else spec.query_scale
    x = w["model.embed_tokens.weight"][token_ids] * math.sqrt(spec.hidden_size)
    for i in range(spec.num_layers):
        layer = f"model.layers.{i}"
        window = spec.windows[i] if spec.windows else 0
        if window:
            inv_freq, factor = inverse_frequencies(dim, spec.local_rope_theta, None, spec.max_position_embeddings)
        else:
            inv_freq, factor = inverse_frequencies(
                dim, spec.rope_theta, spec.rope_scaling, spec.max_position_embeddings
            )
        h = norm(x, w[f"{layer}.input_layernorm.weight"], eps)
        q = (h @ w[f"{layer}.self_attn.q_proj.weight"].T).reshape(length, heads, dim)
        k = (h @ w[f"{layer}.self_attn.k_proj.weight"].T).reshape(length, kv_heads, dim)
        v = (h @ w[f"{layer}.self_attn.v_proj.weight"].T).reshape(length, kv_heads, dim)
        q = rotate(norm(q, w[f"{layer}.self_attn.q_norm.weight"], eps), positions, inv_freq, factor)
        k = rotate(norm(k, w[f"{layer}.self_attn.k_norm.weight"], eps), positions, inv_freq, factor)
        out = np.zeros_like(q)
        for t in range(length):
            begin = max(0, t + 1 - window) if window else 0
            for head in range(heads):
                kv = head // (heads // kv_heads)
                scores = capped(k[begin : t + 1, kv] @ q[t, head] * scale, spec.attention_soft_cap)
                weights = np.exp(scores - scores.max())
                out[t, head] = weights @ v[begin : t + 1, kv] / weights.sum()
        y = out.reshape(length, -1) @ w[f"{layer}.self_attn.o_proj.weight"].T
        x = x + norm(y, w[f"{layer}.post_attention_layernorm.weight"], eps)
        h = norm(x, w[f"{layer}.pre_feedforward_layernorm.weight"], eps)
        y = gelu(h @ w[f"{layer}.mlp.gate_proj.weight"].T) * (h @ w[f"{layer}.mlp.up_proj.weight"].T)
        x = x + norm(y @ w[f"{layer}.mlp.down_proj.weight"].T, w[f"{layer}.post_feedforward_layernorm.weight"], eps)
    x = norm(x, w["model.norm.weight"], eps)
    head = w["model.embed_tokens.weight"] if spec.tie_word_embeddings else w["lm_head.weight"]
    return capped((x @ head.T)[:, : spec.vocab_size], spec.logit_soft_cap)
