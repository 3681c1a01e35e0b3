"""The parameters of the Llama family and Gemma 3: shapes, axes, and where they come from in a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.errors import ModelLoadError
from pagedjax.models.spec import ModelSpec


class Parameter(NamedTuple):
    """Attributes:
    shape: its array's.
    axes: a logical name per axis, for sharding rules; None: replicated.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]


def layer_parameters(spec: ModelSpec) -> dict[str, Parameter]:
    """Parameters of the layers, stacked on a leading L. Fused kernels keep what is sharded together side by side:
    qkv [L, d, K, H/K + 2, D] (of each KV head: its query heads, its key, its value), gate_up [L, d, 2, f]."""
    layers, d, f = spec.num_layers, spec.hidden_size, spec.intermediate_size
    kv, slots, dim = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads + 2, spec.head_dim
    table = {
        "attention_norm": Parameter((layers, d), ("layer", None)),
        "qkv": Parameter((layers, d, kv, slots, dim), ("layer", None, "kv_head", None, None)),
        "out": Parameter((layers, kv, slots - 2, dim, d), ("layer", "kv_head", None, None, None)),
        "mlp_norm": Parameter((layers, d), ("layer", None)),
        "gate_up": Parameter((layers, d, 2, f), ("layer", None, None, "mlp")),
        "down": Parameter((layers, f, d), ("layer", "mlp", None)),
    }
    if spec.attention_bias:
        table["qkv_bias"] = Parameter((layers, kv, slots, dim), ("layer", "kv_head", None, None))
    if spec.attention_out_bias:
        table["out_bias"] = Parameter((layers, d), ("layer", None))
    if spec.mlp_bias:
        table["gate_up_bias"] = Parameter((layers, 2, f), ("layer", None, "mlp"))
        table["down_bias"] = Parameter((layers, d), ("layer", None))
    if spec.norms_around:
        table["post_attention_norm"] = Parameter((layers, d), ("layer", None))
        table["post_mlp_norm"] = Parameter((layers, d), ("layer", None))
    if spec.qk_norm:
        table["q_norm"] = Parameter((layers, dim), ("layer", None))
        table["k_norm"] = Parameter((layers, dim), ("layer", None))
    return table


def outer_parameters(spec: ModelSpec, num_vocab_rows: int | None = None) -> dict[str, Parameter]:
    """Embedding [V', d], final norm [d], and a head [V', d] unless tied; V' >= V rows, the rest is padding."""
    rows = spec.vocab_size if num_vocab_rows is None else num_vocab_rows
    table = {
        "embedding": Parameter((rows, spec.hidden_size), ("vocab", None)),
        "final_norm": Parameter((spec.hidden_size,), (None,)),
    }
    if not spec.tie_word_embeddings:
        table["head"] = Parameter((rows, spec.hidden_size), ("vocab", None))
    return table


def random_parameters(spec: ModelSpec, dtype: Any, key: jax.Array) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """(outer, layers) with normal kernels of variance 1 / fan-in, small biases, norms that multiply by about one."""

    def draw(key: jax.Array, name: str, parameter: Parameter) -> jax.Array:
        x = jax.random.normal(key, parameter.shape, jnp.float32)
        if name.endswith("norm"):
            return (0.1 * x + (0 if spec.norms_around else 1)).astype(dtype)
        if name.endswith("bias"):
            return (0.1 * x).astype(dtype)
        if name in ("embedding", "head"):
            return (x * spec.hidden_size**-0.5).astype(dtype)
        fan_in = {"out": spec.num_heads * spec.head_dim, "down": spec.intermediate_size}.get(name, spec.hidden_size)
        return (x * fan_in**-0.5).astype(dtype)

    outer, layers = outer_parameters(spec), layer_parameters(spec)
    keys = iter(jax.random.split(key, len(outer) + len(layers)))
    return (
        {name: draw(next(keys), name, parameter) for name, parameter in outer.items()},
        {name: draw(next(keys), name, parameter) for name, parameter in layers.items()},
    )


class _Checkpoint:
    """Reads tensors by name, checks their shapes, says which one is wrong."""

    def __init__(self, tensors: Mapping[str, Any], dtype: Any):
        self.tensors, self.dtype = tensors, jnp.dtype(dtype)
        # Checkpoints of the bare decoder lack the prefix.
        self.prefix = "model." if "model.embed_tokens.weight" in tensors or "embed_tokens.weight" not in tensors else ""

    def has(self, name: str) -> bool:
        return self._full(name) in self.tensors

    def _full(self, name: str) -> str:
        return name if name.startswith("lm_head") else self.prefix + name

    def get(self, name: str, *shape: int | None) -> np.ndarray:
        full = self._full(name)
        if full not in self.tensors:
            raise ModelLoadError(f"the checkpoint has no tensor {full!r}")
        array = np.asarray(self.tensors[full])
        if array.ndim != len(shape) or any(
            want is not None and want != n for n, want in zip(array.shape, shape, strict=True)
        ):
            raise ModelLoadError(f"tensor {full!r} must have shape {shape}, got {array.shape}")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ModelLoadError(f"tensor {full!r} must be floating point, got {array.dtype}")
        return array.astype(self.dtype)


def load_parameters(
    spec: ModelSpec, tensors: Mapping[str, Any], dtype: Any
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """(outer, layers) from tensors under Hugging Face names and in its orientation ([out, in]).

    A tied model takes its embedding as head, whether or not the checkpoint has a spare `lm_head.weight`.

    Raises:
      ModelLoadError: a tensor that is missing, misshaped or not floating point; names it.
    """
    source = _Checkpoint(tensors, dtype)
    d = spec.hidden_size
    embedding = source.get("embed_tokens.weight", None, d)
    if embedding.shape[0] < spec.vocab_size:
        raise ModelLoadError(f"the embedding has {embedding.shape[0]} rows, fewer than vocab_size = {spec.vocab_size}")
    outer = {"embedding": embedding, "final_norm": source.get("norm.weight", d)}
    if not spec.tie_word_embeddings:
        head = source.get("lm_head.weight", None, d)
        if head.shape[0] < spec.vocab_size:
            raise ModelLoadError(f"lm_head.weight has {head.shape[0]} rows, fewer than vocab_size = {spec.vocab_size}")
        outer["head"] = head
    layers = {}
    for name, parameter in layer_parameters(spec).items():
        # One stacked array at a time, filled in place: the host never holds the layers twice.
        stacked = np.empty(parameter.shape, source.dtype)
        for i in range(spec.num_layers):
            stacked[i] = _READERS[name](spec, source, f"layers.{i}.")
        layers[name] = jnp.asarray(stacked)
    return {name: jnp.asarray(array) for name, array in outer.items()}, layers


def _qkv(spec: ModelSpec, source: _Checkpoint, layer: str) -> np.ndarray:
    kv, group, dim, d = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim, spec.hidden_size
    q = source.get(f"{layer}self_attn.q_proj.weight", spec.num_heads * dim, d).reshape(kv, group, dim, d)
    k = source.get(f"{layer}self_attn.k_proj.weight", kv * dim, d).reshape(kv, 1, dim, d)
    v = source.get(f"{layer}self_attn.v_proj.weight", kv * dim, d).reshape(kv, 1, dim, d)
    return np.concatenate([q, k, v], axis=1).transpose(3, 0, 1, 2)


def _qkv_bias(spec: ModelSpec, source: _Checkpoint, layer: str) -> np.ndarray:
    kv, group, dim = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim
    q = source.get(f"{layer}self_attn.q_proj.bias", spec.num_heads * dim).reshape(kv, group, dim)
    k = source.get(f"{layer}self_attn.k_proj.bias", kv * dim).reshape(kv, 1, dim)
    v = source.get(f"{layer}self_attn.v_proj.bias", kv * dim).reshape(kv, 1, dim)
    return np.concatenate([q, k, v], axis=1)


def _out(spec: ModelSpec, source: _Checkpoint, layer: str) -> np.ndarray:
    kv, group, dim, d = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim, spec.hidden_size
    return source.get(f"{layer}self_attn.o_proj.weight", d, spec.num_heads * dim).T.reshape(kv, group, dim, d)


def _gate_up(spec: ModelSpec, source: _Checkpoint, layer: str) -> np.ndarray:
    f, d = spec.intermediate_size, spec.hidden_size
    return np.stack([source.get(f"{layer}mlp.{name}_proj.weight", f, d).T for name in ("gate", "up")], axis=1)


def _gate_up_bias(spec: ModelSpec, source: _Checkpoint, layer: str) -> np.ndarray:
    return np.stack([source.get(f"{layer}mlp.{name}_proj.bias", spec.intermediate_size) for name in ("gate", "up")])


_READERS: dict[str, Callable[[ModelSpec, _Checkpoint, str], np.ndarray]] = {
    "attention_norm": lambda spec, source, layer: source.get(f"{layer}input_layernorm.weight", spec.hidden_size),
    "qkv": _qkv,
    "qkv_bias": _qkv_bias,
    "out": _out,
    "out_bias": lambda spec, source, layer: source.get(f"{layer}self_attn.o_proj.bias", spec.hidden_size),
    "q_norm": lambda spec, source, layer: source.get(f"{layer}self_attn.q_norm.weight", spec.head_dim),
    "k_norm": lambda spec, source, layer: source.get(f"{layer}self_attn.k_norm.weight", spec.head_dim),
    "mlp_norm": lambda spec, source, layer: source.get(
        f"{layer}{'pre_feedforward' if spec.norms_around else 'post_attention'}_layernorm.weight", spec.hidden_size
    ),
    "post_attention_norm": lambda spec, source, layer: source.get(
        f"{layer}post_attention_layernorm.weight", spec.hidden_size
    ),
    "post_mlp_norm": lambda spec, source, layer: source.get(
        f"{layer}post_feedforward_layernorm.weight", spec.hidden_size
    ),
    "gate_up": _gate_up,
    "gate_up_bias": _gate_up_bias,
    "down": lambda spec, source, layer: (
        source.get(f"{layer}mlp.down_proj.weight", spec.hidden_size, spec.intermediate_size).T
    ),
    "down_bias": lambda spec, source, layer: source.get(f"{layer}mlp.down_proj.bias", spec.hidden_size),
}
