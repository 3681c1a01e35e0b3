"""config.json -> ModelSpec."""

from __future__ import annotations

import pytest

from pagedjax.errors import ModelLoadError
from pagedjax.models import Llama, get_model, spec_from_hf

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}


def test_smollm2():
    spec = spec_from_hf(
        {
            "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
            "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
            "intermediate_size": 1536, "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama",
            "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "rms_norm_eps": 1e-05,
            "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True,
            "vocab_size": 49152,
        }
    )  # fmt: skip
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert spec.tie_word_embeddings
    assert spec.rope_theta == 100000
    assert spec.rope_scaling is None
    assert spec.num_parameters == 134515008
    assert spec.windows == ()
    hash(spec)


def test_defaults_of_absent_keys():
    spec = spec_from_hf(BASE)
    assert spec.num_kv_heads == 4
    assert spec.head_dim == 16
    assert spec.rope_theta == 10000.0
    assert not spec.tie_word_embeddings
    assert not spec.attention_bias
    assert get_model(spec.architecture) is Llama


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
    ],
)
def test_rotary_scaling_in_every_spelling(rope):
    spec = spec_from_hf({**BASE, **rope})
    assert spec.rope_theta == 5e5
    assert (
        spec.rotary == spec_from_hf({**BASE, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}).rotary
    )
    assert spec.rotary != spec_from_hf({**BASE, "rope_theta": 5e5}).rotary
    hash(spec)


def test_default_scaling_is_none():
    assert spec_from_hf({**BASE, "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}).rope_scaling is None


def test_original_context_beside_the_scaling():
    scaling = {"rope_type": "yarn", "factor": 4.0}
    outside = spec_from_hf({**BASE, "rope_scaling": scaling, "original_max_position_embeddings": 512})
    inside = spec_from_hf({**BASE, "rope_scaling": {**scaling, "original_max_position_embeddings": 512}})
    assert outside.rotary == inside.rotary


def test_mistral_windows():
    mistral = {**BASE, "architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
    assert spec_from_hf({**mistral, "sliding_window": 100}).windows == (100,) * 4
    assert spec_from_hf({**mistral, "sliding_window": None}).windows == ()
    assert spec_from_hf(mistral).windows == (4096,) * 4
    assert spec_from_hf({**BASE, "sliding_window": 100}).windows == ()


def test_qwen2():
    qwen = {**BASE, "architectures": ["Qwen2ForCausalLM"]}
    spec = spec_from_hf({**qwen, "use_sliding_window": False, "sliding_window": 100, "max_window_layers": 2})
    assert spec.attention_bias
    assert not spec.attention_out_bias
    assert spec.windows == ()
    windowed = {**qwen, "use_sliding_window": True, "sliding_window": 100, "max_window_layers": 3}
    assert spec_from_hf(windowed).windows == (0, 0, 0, 100)
    types = ["sliding_attention", "full_attention"] * 2
    assert spec_from_hf({**windowed, "layer_types": types}).windows == (100, 0, 100, 0)


def test_qwen3_and_llama_biases():
    spec = spec_from_hf({**BASE, "architectures": ["Qwen3ForCausalLM"]})
    assert spec.qk_norm
    assert spec.head_dim == 128
    spec = spec_from_hf({**BASE, "attention_bias": True, "mlp_bias": True})
    assert spec.attention_bias
    assert spec.attention_out_bias
    assert spec.mlp_bias


def test_model_type_stands_in_for_a_missing_architecture():
    assert spec_from_hf({**BASE, "architectures": None, "model_type": "qwen2"}).architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "unsupported architecture: GPT2LMHeadModel; supported are LlamaFor"),
        ({"architectures": [], "model_type": "mamba"}, "unsupported architecture: model_type 'mamba'"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
        ({"num_hidden_layers": None}, "num_hidden_layers must be a positive integer, got None"),
        ({"vocab_size": -5}, "vocab_size must be a positive integer, got -5"),
        ({"num_key_value_heads": 3}, "num_heads = 4 is not a multiple of num_kv_heads = 3"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type must be one of .* got 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs 'factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, got 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ by layer type"),
    ],
)
def test_what_is_not_supported_is_named(changes, message):
    with pytest.raises(ModelLoadError, match=message):
        spec_from_hf({**BASE, **changes})


def test_unknown_model():
    with pytest.raises(ModelLoadError, match="unsupported architecture: T5Model"):
        get_model("T5Model")
