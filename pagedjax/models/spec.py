"""What a model is, as numbers: read from a Hugging Face config.json (or a GGUF file's header put in its terms)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from flax.core import FrozenDict

from pagedjax.errors import ModelLoadError
from pagedjax.models.groups import LayerGroups, layer_groups
from pagedjax.nn.rotary import RotaryTable, rotary_table

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM")
_MODEL_TYPES = {"llama": 0, "mistral": 1, "qwen2": 2, "qwen3": 3, "gemma3_text": 4}


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A decoder of the Llama family, or Gemma 3. Immutable and hashable, so that it can be a static argument.

    Attributes:
      architecture: Hugging Face's class name.
      num_layers, hidden_size, intermediate_size: L, d, f.
      num_heads, num_kv_heads, head_dim: H, K, D.
      vocab_size: V, the ids that exist; the embedding may have more rows (padding), which no output shows.
      max_position_embeddings: the longest context the model was made for, in tokens.
      rope_theta, rope_scaling: see pagedjax.nn.rotary_table.
      norm_eps: of the RMS norms.
      tie_word_embeddings: the head is the embedding.
      attention_bias: q, k and v projections have biases; attention_out_bias: so has the output projection.
      mlp_bias: all three of the MLP have.
      qk_norm: RMS norm on every query and key head ahead of the rotary embedding (Qwen3, Gemma 3).
      windows: i per layer, positions that a query sees, itself included; 0: all. Empty: all layers see all.
      local_rope_theta: base of the rotary embedding, without scaling, in layers with a window; None: as elsewhere.
      query_scale: factor on q . k; None: head_dim ** -0.5.
      attention_soft_cap, logit_soft_cap: c of c * tanh(x / c) over scores and logits; None: off.
      activation: of the MLP's gate, "silu" or "gelu_tanh".
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()
    local_rope_theta: float | None = None
    query_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    activation: str = "silu"

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "vocab_size",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ModelLoadError(f"{name} must be a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}"
            )
        if self.windows and len(self.windows) != self.num_layers:
            raise ModelLoadError(
                f"windows must have an entry for each of {self.num_layers} layers, got {len(self.windows)}"
            )
        for window in self.windows:
            if isinstance(window, bool) or not isinstance(window, int) or window < 0:
                raise ModelLoadError(f"windows must be numbers of tokens (0: all), got {window!r}")
        if self.activation not in ("silu", "gelu_tanh"):
            raise ModelLoadError(f"activation must be silu or gelu_tanh, got {self.activation!r}")
        if self.rope_scaling is not None:
            object.__setattr__(self, "rope_scaling", FrozenDict(self.rope_scaling))
        _ = self.rotary, self.local_rotary  # a bad scaling is found here, not in the first forward pass

    @property
    def rotary(self) -> RotaryTable:
        """The rotary frequencies."""
        try:
            return rotary_table(self.head_dim, self.rope_theta, self.rope_scaling, self.max_position_embeddings)
        except ValueError as error:
            raise ModelLoadError(str(error)) from error

    @property
    def local_rotary(self) -> RotaryTable:
        """The rotary frequencies of layers with a window."""
        if self.local_rope_theta is None:
            return self.rotary
        return rotary_table(self.head_dim, self.local_rope_theta, None, self.max_position_embeddings)

    @property
    def groups(self) -> LayerGroups:
        """Which layers share a page table."""
        return layer_groups(self.num_layers, self.windows)

    @property
    def norms_around(self) -> bool:
        """Whether attention and MLP have a norm behind them too, and norms' weights are stored less one (Gemma)."""
        return self.architecture == "Gemma3ForCausalLM"

    @property
    def num_parameters(self) -> int:
        """Weights in the layers, the embedding and the head."""
        d, f = self.hidden_size, self.intermediate_size
        attention = d * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        embeddings = self.vocab_size * d * (1 if self.tie_word_embeddings else 2)
        norms = (4 if self.norms_around else 2) * d + (2 * self.head_dim if self.qk_norm else 0)
        return self.num_layers * (attention + 3 * d * f + norms) + embeddings + d


def spec_from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Reads a Hugging Face config.json, in the spelling of transformers 4 or 5.

    Raises:
      ModelLoadError: an architecture, activation or rotary scaling that is not supported, or a missing or bad number;
        names it, and what is supported.
    """
    architecture = _architecture(config)
    if architecture == "Gemma3ForCausalLM":
        return _gemma3(config)
    heads = _integer(config, "num_attention_heads")
    hidden = _integer(config, "hidden_size")
    activation = config.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise ModelLoadError(f"hidden_act must be silu, got {activation!r}")
    theta, scaling = _rope(config)
    llama = architecture == "LlamaForCausalLM"
    # Qwen2 has biases on q, k and v by design, without saying so; the others say.
    bias = bool(config.get("attention_bias", False))
    layers = _integer(config, "num_hidden_layers")
    return ModelSpec(
        architecture=architecture,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=_integer(config, "num_key_value_heads", 8 if architecture == "MistralForCausalLM" else heads),
        head_dim=_integer(config, "head_dim", 128 if architecture == "Qwen3ForCausalLM" else hidden // max(heads, 1)),
        intermediate_size=_integer(config, "intermediate_size"),
        vocab_size=_integer(config, "vocab_size"),
        max_position_embeddings=_integer(config, "max_position_embeddings", 2048),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bias or architecture == "Qwen2ForCausalLM",
        attention_out_bias=bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=bool(config.get("mlp_bias", False)) and llama,
        qk_norm=architecture == "Qwen3ForCausalLM",
        windows=_windows(config, architecture, layers),
    )


def _gemma3(config: Mapping[str, Any]) -> ModelSpec:
    """Gemma 3, text only. Defaults are transformers', as published files leave out what equals them."""
    activation = config.get("hidden_activation") or config.get("hidden_act") or "gelu_pytorch_tanh"
    if activation != "gelu_pytorch_tanh":
        raise ModelLoadError(f"hidden_activation must be gelu_pytorch_tanh, got {activation!r}")
    if config.get("use_bidirectional_attention"):
        raise ModelLoadError("config: use_bidirectional_attention is not supported")
    layers = _integer(config, "num_hidden_layers", 26)
    theta, scaling, local_theta = _gemma3_rope(config)
    bias = bool(config.get("attention_bias", False))
    return ModelSpec(
        architecture="Gemma3ForCausalLM",
        num_layers=layers,
        hidden_size=_integer(config, "hidden_size", 2304),
        num_heads=_integer(config, "num_attention_heads", 8),
        num_kv_heads=_integer(config, "num_key_value_heads", 4),
        head_dim=_integer(config, "head_dim", 256),
        intermediate_size=_integer(config, "intermediate_size", 9216),
        vocab_size=_integer(config, "vocab_size", 262_208),
        max_position_embeddings=_integer(config, "max_position_embeddings", 131_072),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", True)),
        attention_bias=bias,
        attention_out_bias=bias,
        qk_norm=True,
        windows=_gemma3_windows(config, layers),
        local_rope_theta=local_theta,
        query_scale=_positive(config, "query_pre_attn_scalar", 256) ** -0.5,
        attention_soft_cap=_positive(config, "attn_logit_softcapping"),
        logit_soft_cap=_positive(config, "final_logit_softcapping"),
        activation="gelu_tanh",
    )


def _gemma3_rope(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None, float]:
    """(theta, scaling, theta of layers with a window). transformers 5 keeps a dict for each kind of layer."""
    by_kind = config.get("rope_parameters") or {}
    whole, local = by_kind.get("full_attention") or {}, by_kind.get("sliding_attention") or {}
    if (local.get("rope_type") or "default") != "default":
        raise ModelLoadError(f"config: a rotary scaling of sliding layers is not supported, got {dict(local)!r}")
    theta, scaling = _rope({**config, "rope_theta": config.get("rope_theta") or 1e6, "rope_parameters": whole})
    return theta, scaling, float(local.get("rope_theta") or config.get("rope_local_base_freq") or 10000.0)


def _gemma3_windows(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    window = _integer(config, "sliding_window", 4096)
    types = config.get("layer_types")
    if types is None:
        pattern = _integer(config, "sliding_window_pattern", 6)
        types = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)]
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def _positive(config: Mapping[str, Any], key: str, default: float | None = None) -> Any:
    """A number above 0, None where there is none."""
    value = config.get(key)
    value = default if value is None else value
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
        raise ModelLoadError(f"config: {key} must be a positive number, got {value!r}")
    return value


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures") or ()
    for name in named:
        if name in ARCHITECTURES:
            return name
    model_type = config.get("model_type")
    if not named and model_type in _MODEL_TYPES:
        return ARCHITECTURES[_MODEL_TYPES[model_type]]
    found = ", ".join(map(str, named)) or f"model_type {model_type!r}"
    raise ModelLoadError(f"unsupported architecture: {found}; supported are {', '.join(ARCHITECTURES)}")


def _integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"config: {key} must be a positive integer, got {value!r}")
    return value


def _rope(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling): transformers 5 keeps both in `rope_parameters`, 4 in `rope_theta` and `rope_scaling`."""
    parameters = config.get("rope_parameters") or {}
    scaling = dict(config.get("rope_scaling") or parameters)
    theta = scaling.pop("rope_theta", None) or parameters.get("rope_theta") or config.get("rope_theta") or 10000.0
    partial = scaling.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ModelLoadError(f"config: partial_rotary_factor must be 1, got {partial!r}")
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise ModelLoadError(f"config: rotary parameters that differ by layer type are not supported, got {scaling!r}")
    if "original_max_position_embeddings" not in scaling and config.get("original_max_position_embeddings"):
        scaling["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    return float(theta), None if kind == "default" else scaling


def _windows(config: Mapping[str, Any], architecture: str, layers: int) -> tuple[int, ...]:
    if architecture == "LlamaForCausalLM":
        return ()
    if architecture == "MistralForCausalLM":
        window = config.get(
            "sliding_window", 4096
        )  # where the key is missing, 4096 is what the checkpoint was made with
        return (window,) * layers if window else ()
    window = config.get("sliding_window") if config.get("use_sliding_window", False) else None
    if not window:
        return ()
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", 28)
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in types)
    return windows if any(windows) else ()
