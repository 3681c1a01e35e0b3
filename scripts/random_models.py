"""Models of known shapes with random weights: how fast they are does not depend on what the weights are."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pagedjax.models import Llama, ModelSpec
from pagedjax.weights import LoadedModel

_LLAMA = {"architecture": "LlamaForCausalLM", "norm_eps": 1e-5}
SHAPES = {
    "smollm2-135m": ModelSpec(
        num_layers=30,
        hidden_size=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=49152,
        max_position_embeddings=8192,
        rope_theta=1e5,
        tie_word_embeddings=True,
        **_LLAMA,
    ),
    "llama-3-8b": ModelSpec(
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        vocab_size=128256,
        max_position_embeddings=8192,
        rope_theta=5e5,
        **_LLAMA,
    ),
}
PREFIX = "random:"


def random_model(text: str, dtype: str) -> LoadedModel:
    """The model that "random:NAME" or "random:NAME:LAYERS" asks for, without a tokenizer.

    Raises:
      SystemExit: no such shape, or no such number of layers.
    """
    name, _, layers = text.removeprefix(PREFIX).partition(":")
    if name not in SHAPES:
        raise SystemExit(f"error: --model={text}: shapes are {', '.join(SHAPES)}")
    spec = SHAPES[name]
    if layers:
        if not layers.isdecimal() or not 1 <= int(layers) <= 1000:
            raise SystemExit(f"error: --model={text}: the number of layers must be in [1, 1000], got {layers!r}")
        spec = dataclasses.replace(spec, num_layers=int(layers))
    return LoadedModel(Llama.random(spec, jnp.dtype(dtype)), spec, None, text)
