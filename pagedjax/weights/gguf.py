"""A GGUF file in Hugging Face's terms: metadata as a config, tensors under its names and in its row order."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from pagedjax.errors import ModelLoadError
from pagedjax.models import ModelSpec, spec_from_hf
from pagedjax.weights.gguf_file import GGUFFile

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
# Pairs of a rotary embedding are neighbours in this architecture's files, and half a head apart in Hugging Face's.
_INTERLEAVED = ("llama",)

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Gemma 3 has norms behind attention and MLP too.
_GEMMA3_LAYER = {
    **_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER_NAME = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)")
# Rotary frequencies are computed; these hold them once more.
_IGNORED = re.compile(r"(blk\.\d+\.)?(rope_freqs|attn_rot_embd)(\.weight)?|rope_freqs\.weight")

# Fields of llama3 rotary scaling in every model published with it; files carry only the factors that follow from them.
_LLAMA3_USUAL = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class _Source(NamedTuple):
    name: str
    num_heads: int = 0  # of a q or k projection whose rows want reordering, else 0
    offset: float = 0.0  # what the file adds to the numbers


class GGUFTensors(Mapping[str, np.ndarray]):
    """The tensors by Hugging Face name, decoded one at a time when asked for; nothing is kept."""

    def __init__(self, file: GGUFFile, sources: Mapping[str, _Source]):
        self._file, self._sources = file, sources

    def __getitem__(self, name: str) -> np.ndarray:
        source = self._sources[name]
        array = self._file.tensor(source.name)
        if source.offset:
            array = array - np.asarray(source.offset, array.dtype)
        return _half_apart(array, source.num_heads) if source.num_heads else array

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def read_gguf(file: GGUFFile) -> tuple[ModelSpec, GGUFTensors]:
    """What the model is, and its tensors.

    Raises:
      ModelLoadError: an architecture, feature or tensor that is not supported, or missing or contradictory metadata.
    """
    spec = _spec(file)
    return spec, GGUFTensors(file, _sources(file, spec))


def read_spec(file: GGUFFile) -> ModelSpec:
    """What the model is; no tensor is read. ModelLoadError as in `read_gguf`."""
    return _spec(file)


def _half_apart(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows [heads * D, ...] with rotary pairs (2i, 2i + 1) reordered to pairs (i, i + D/2)."""
    rows = array.reshape(num_heads, -1, 2, *array.shape[1:])
    return rows.swapaxes(1, 2).reshape(array.shape)


class _Metadata:
    """Typed look-ups with errors that name the file and the key."""

    def __init__(self, file: GGUFFile, prefix: str):
        self._file, self._prefix = file, prefix

    def fail(self, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{self._file.path}: {reason}")

    def get(self, key: str, kinds: tuple[type, ...], default: Any = None) -> Any:
        value = self._file.metadata.get(f"{self._prefix}.{key}", default)
        if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
            # Some writers give one count per layer; where all agree it is the model's.
            if isinstance(value, np.ndarray) and len(value) and len(set(value.tolist())) == 1:
                return self._same(key, value, kinds)
            raise self.fail(f"metadata {self._prefix}.{key} has an unusable value: {value!r:.100}")
        return value

    def _same(self, key: str, values: np.ndarray, kinds: tuple[type, ...]) -> Any:
        value = values[0].item()
        if not isinstance(value, kinds):
            raise self.fail(f"metadata {self._prefix}.{key} has an unusable value: {value!r}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, (int,), default)
        if value is None or value < 1:
            raise self.fail(f"metadata {self._prefix}.{key} must be a positive integer, got {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        value = self.get(key, (int, float), default)
        if value is not None and not math.isfinite(value):
            raise self.fail(f"metadata {self._prefix}.{key} must be a finite number, got {value!r}")
        # Files hold float32; its shortest decimal is the number that was meant (1e-6, not 9.99999997e-7).
        return float(str(np.float32(value))) if isinstance(value, float) else value


def _spec(file: GGUFFile) -> ModelSpec:
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelLoadError(
            f"{file.path}: unsupported GGUF architecture {architecture!r}; supported are {', '.join(ARCHITECTURES)}"
        )
    meta = _Metadata(file, architecture)
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise meta.fail(f"one of {file.metadata['split.count']} parts; merge them first (llama-gguf-split --merge)")
    if meta.number("expert_count", 0):
        raise meta.fail("mixtures of experts are not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise meta.fail("the file has no token embedding [V, d]; it holds a part of a model, or none")
    heads, hidden = meta.integer("attention.head_count"), meta.integer("embedding_length")
    head_dim = meta.integer("attention.key_length", max(1, hidden // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if meta.integer(key, head_dim) != head_dim:
            raise meta.fail(
                f"{architecture}.{key} = {meta.integer(key)} differs from the head size {head_dim}: not supported"
            )
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "num_hidden_layers": meta.integer("block_count"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": meta.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": meta.integer("feed_forward_length"),
        "vocab_size": min(meta.integer("vocab_size", embedding.shape[0]), embedding.shape[0]),
        "max_position_embeddings": meta.integer("context_length"),
        "rope_theta": meta.number("rope.freq_base", 10000.0),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon", 1e-5),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    _check_shapes(file, meta, config)
    config["rope_scaling"] = _rope_scaling(file, meta, config)
    if architecture == "gemma3":
        config |= _gemma3(meta, config)
    try:
        spec = spec_from_hf(config)
    except ModelLoadError as error:
        raise meta.fail(str(error)) from error
    # A config says by one flag what a file shows tensor by tensor.
    return dataclasses.replace(
        spec,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        attention_out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
    )


def _gemma3(meta: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """What files leave unsaid is so in every Gemma 3: the bases, the pattern, and how queries are scaled."""
    largest = config["num_hidden_layers"] == 62  # the 27B model alone goes by d / H, which is not its head size
    return {
        "rope_theta": meta.number("rope.freq_base", 1e6),
        "sliding_window": meta.integer("attention.sliding_window"),
        "sliding_window_pattern": meta.integer("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": meta.number("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": (
            config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
        ),
        "attn_logit_softcapping": meta.number("attn_logit_softcapping"),
        "final_logit_softcapping": meta.number("final_logit_softcapping"),
    }


def _check_shapes(file: GGUFFile, meta: _Metadata, config: Mapping[str, Any]) -> None:
    """The metadata against the tensors, before anything is allocated by its numbers."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    expected = {
        "blk.0.attn_q.weight": (config["num_attention_heads"] * dim, hidden),
        "blk.0.attn_k.weight": (config["num_key_value_heads"] * dim, hidden),
        "blk.0.ffn_gate.weight": (config["intermediate_size"], hidden),
        "token_embd.weight": (file.tensors["token_embd.weight"].shape[0], hidden),
    }
    for name, shape in expected.items():
        found = file.tensors[name].shape if name in file.tensors else "none"
        if found != shape:
            raise meta.fail(f"tensor {name!r} must have shape {shape} by the metadata, but the file has {found}")
    layers = {int(match[1]) for name in file.tensors if (match := _LAYER_NAME.fullmatch(name))}
    if layers != set(range(len(layers))) or len(layers) != config["num_hidden_layers"]:
        raise meta.fail(
            f"{config['num_hidden_layers']} layers by the metadata, but the file has tensors of {len(layers)}"
        )


def _rope_scaling(file: GGUFFile, meta: _Metadata, config: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = meta.get("rope.scaling.type", (str,), "none")
    if "rope_freqs.weight" in file.tensors:
        if kind not in ("none", "llama3"):
            raise meta.fail(f"rope_freqs.weight together with rope scaling {kind!r} is not supported")
        factors = file.tensor("rope_freqs.weight").astype(np.float64)
        return _scaling_from_factors(factors, config, meta)
    if kind == "none":
        factor = meta.number("rope.scale_linear", 1.0)  # the spelling of files from 2023
        return None if factor in (0.0, 1.0) else {"rope_type": "linear", "factor": factor}
    scaling: dict[str, Any] = {"rope_type": kind, "factor": meta.number("rope.scaling.factor", 1.0)}
    context = meta.get("rope.scaling.original_context_length", (int,))
    if context:
        scaling["original_max_position_embeddings"] = context
    if kind == "yarn":
        for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            value = meta.number(f"rope.scaling.{key}")
            if value:
                scaling[name] = value
        share = meta.number("rope.scaling.attn_factor") or meta.number("rope.scaling.yarn_attn_factor")
        if share is not None and share != 1.0:
            # In these files the magnitude of YaRN multiplies the factor; in a config the factor is the whole.
            scaling["attention_factor"] = share * (1.0 + 0.1 * math.log(max(scaling["factor"], 1.0)))
    return scaling


def _scaling_from_factors(factors: np.ndarray, config: Mapping[str, Any], meta: _Metadata) -> dict[str, Any] | None:
    """Rotary scaling of the llama3 kind from what it divides each frequency by, [D/2].

    The factor is 1 for fast frequencies, `factor` for slow ones, and in between keep + (1 - keep) / factor is one over
    it, where keep = (turns - low) / (high - low) is linear in the frequency. Only the product of the original context
    with 1 / (high - low) can be told, so low is taken as 1 where the usual values do not fit.
    """
    dim = config["head_dim"]
    if factors.shape != (dim // 2,) or not np.all(np.isfinite(factors)) or factors.min() < 0.999:
        raise meta.fail(f"rope_freqs.weight must hold {dim // 2} factors of at least 1, got shape {factors.shape}")
    factor = float(factors.max())
    if factor < 1.001:
        return None
    if factors.min() > 0.999 * factor:
        return {"rope_type": "linear", "factor": factor}
    inv_freq = config["rope_theta"] ** -(np.arange(0, dim, 2) / dim)
    candidates: list[dict[str, float]] = [dict(_LLAMA3_USUAL)]
    keep = (1 / factors - 1 / factor) / (1 - 1 / factor)
    ramp = (keep > 1e-3) & (keep < 1 - 1e-3)
    if ramp.sum() >= 2:
        slope, level = np.polyfit(inv_freq[ramp], keep[ramp], 1)
        if slope > 0 > level:
            high = 1 - 1 / level
            context = 2 * math.pi * slope * (high - 1)
            candidates.append({**_LLAMA3_USUAL, "high_freq_factor": high, "original_max_position_embeddings": context})
    for known in candidates:
        turns = known["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
        low, high = known["low_freq_factor"], known["high_freq_factor"]
        again = np.clip((turns - low) / (high - low), 0, 1)
        if np.allclose(1 / (again + (1 - again) / factor), factors, rtol=1e-4):
            return {"rope_type": "llama3", "factor": factor, **known}
    raise meta.fail("rope_freqs.weight does not follow a known rotary scaling (linear or llama3)")


def _sources(file: GGUFFile, spec: ModelSpec) -> dict[str, _Source]:
    architecture = file.metadata["general.architecture"]
    heads = {"attn_q": spec.num_heads, "attn_k": spec.num_kv_heads} if architecture in _INTERLEAVED else {}
    layer_names = _GEMMA3_LAYER if spec.norms_around else _LAYER
    sources, unknown = {}, []
    for name, info in file.tensors.items():
        match = _LAYER_NAME.fullmatch(name)
        offset = 1.0 if spec.norms_around and name.endswith("norm.weight") else 0.0
        if name in _OUTER:
            sources[_OUTER[name]] = _Source(name, offset=offset)
        elif match and match[2] in layer_names:
            num_heads = heads.get(match[2], 0)
            if num_heads and info.shape[0] != num_heads * spec.head_dim:
                raise ModelLoadError(
                    f"{file.path}: {name!r} has {info.shape[0]} rows, expected {num_heads} heads of {spec.head_dim}"
                )
            sources[f"model.layers.{match[1]}.{layer_names[match[2]]}.{match[3]}"] = _Source(name, num_heads, offset)
        elif not _IGNORED.fullmatch(name):
            unknown.append(name)
    if unknown:
        raise ModelLoadError(
            f"{file.path}: tensors that no supported model has: {', '.join(unknown[:5])}"
            f"{f' and {len(unknown) - 5} more' if len(unknown) > 5 else ''}"
        )
    return sources
