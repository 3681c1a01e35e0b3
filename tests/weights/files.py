"""Writes tiny models to disk: GGUF, safetensors, and a byte-level tokenizer that both can carry."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy
import transformers
from gguf import GGMLQuantizationType as Kind
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from pagedjax.models import ModelSpec
from tests.goldens.prompts import license_text
from tests.models.harness import tiny_spec

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BOS_TEMPLATE = "{{ bos_token }}" + CHAT_TEMPLATE
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

GEMMA3_NAMES = {
    **NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def block_spec(**changes: Any) -> ModelSpec:
    """A tiny model with rows of multiples of 32 numbers, as quantised types need, and the tokenizer's vocabulary."""
    values = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 96, "num_layers": 2}
    return tiny_spec(**{**values, "vocab_size": len(trained_tokenizer().get_vocab()), **changes})


@functools.cache
def trained_tokenizer() -> Tokenizer:
    """Byte-level BPE with 400 tokens; digits one by one, as `smollm` has it."""
    tokenizer = Tokenizer(models.BPE())
    cut = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cut)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([license_text()], trainer)
    return tokenizer


def hf_tokenizer(*, add_bos: bool = False, chat_template: str | None = CHAT_TEMPLATE) -> Any:
    backend = Tokenizer.from_str(trained_tokenizer().to_str())
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], backend.token_to_id(SPECIAL[0]))]
        )
    extra = {"chat_template": chat_template} if chat_template else {}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        clean_up_tokenization_spaces=False,
        **extra,
    )


def hf_config(spec: ModelSpec, **changes: Any) -> dict[str, Any]:
    config = {
        "architectures": [spec.architecture],
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "rope_theta": spec.rope_theta,
        "rope_scaling": dict(spec.rope_scaling) if spec.rope_scaling else None,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "attention_bias": spec.attention_bias,
        "mlp_bias": spec.mlp_bias,
        "eos_token_id": 2,
    }
    return {**config, **changes}


def write_folder(
    folder: Path,
    spec: ModelSpec,
    tensors: Mapping[str, np.ndarray],
    *,
    shards: int = 1,
    tokenizer: Any = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """A Hugging Face directory with one safetensors file, or several and an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(spec, **(config or {}))))
    names = sorted(tensors)
    if shards == 1:
        safetensors.numpy.save_file(dict(tensors), folder / "model.safetensors")
    else:
        weight_map = {}
        for i in range(shards):
            file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            safetensors.numpy.save_file({name: tensors[name] for name in names[i::shards]}, folder / file)
            weight_map.update(dict.fromkeys(names[i::shards], file))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def gguf_name(name: str, architecture: str = "llama") -> str:
    names = GEMMA3_NAMES if architecture == "gemma3" else NAMES
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        layer, _, rest = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{names[rest]}.{kind}"
    return f"{names[stem]}.{kind}"


def interleave(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Hugging Face's row order of q and k to that of llama GGUF files, row by row: the obvious way."""
    dim = array.shape[0] // num_heads
    rows = [h * dim + (i % 2) * (dim // 2) + i // 2 for h in range(num_heads) for i in range(dim)]
    return array[rows]


def encoded(array: np.ndarray, kind: Kind) -> np.ndarray:
    """A tensor's numbers as GGUFWriter takes them."""
    if kind in (Kind.F32, Kind.F16):
        return array.astype(np.float32 if kind == Kind.F32 else np.float16)
    return gguf.quants.quantize(np.ascontiguousarray(array, np.float32), kind)


def write_gguf(
    path: Path,
    spec: ModelSpec,
    tensors: Mapping[str, np.ndarray],
    *,
    architecture: str = "llama",
    kind: Kind = Kind.F32,
    tokenizer: bool = True,
    keys: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """A GGUF file as llama.cpp's converter lays it out. Norms and biases stay F32; `keys` add or replace metadata."""
    writer = gguf.GGUFWriter(path, architecture)
    numbers = {
        "block_count": spec.num_layers,
        "context_length": spec.max_position_embeddings,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.intermediate_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": float(spec.norm_eps),
        "rope.freq_base": float(spec.rope_theta),
        "vocab_size": spec.vocab_size,
        **({"attention.sliding_window": max(spec.windows)} if spec.windows else {}),
    }
    metadata: dict[str, Any] = {f"{architecture}.{key}": value for key, value in numbers.items()}
    metadata |= {f"tokenizer.{key}": value for key, value in (tokenizer_metadata() if tokenizer else {}).items()}
    for key, value in {**metadata, **(keys or {})}.items():
        put(writer, key, value)
    for name, array in tensors.items():
        if architecture == "llama" and "self_attn.q_proj" in name:
            array = interleave(array, spec.num_heads)
        if architecture == "llama" and "self_attn.k_proj" in name:
            array = interleave(array, spec.num_kv_heads)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            array = array + np.float32(1)
        stored = kind if array.ndim == 2 else Kind.F32
        writer.add_tensor(
            gguf_name(name, architecture), encoded(array, stored), raw_dtype=None if stored < 2 else stored
        )
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def put(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Adds a value under the type that converters use for it; None leaves the key out."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def tokenizer_metadata() -> dict[str, Any]:
    description = json.loads(trained_tokenizer().to_str())
    vocab = description["model"]["vocab"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in description["model"]["merges"]]
    return {
        "ggml.model": "gpt2",
        "ggml.pre": "smollm",
        "ggml.tokens": sorted(vocab, key=vocab.__getitem__),
        "ggml.token_type": [3 if i < len(SPECIAL) else 1 for i in range(len(vocab))],
        "ggml.merges": merges,
        "ggml.bos_token_id": 0,
        "ggml.eos_token_id": 2,
        "ggml.add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }
