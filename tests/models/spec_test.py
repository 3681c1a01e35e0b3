"""config.json -> ModelSpec."""

from __future__ import annotations

import pytest

from pagedjax.errors import ModelLoadError
from pagedjax.models import Gemma3, Llama, get_model, spec_from_hf

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


GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 640, "num_hidden_layers": 18,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 2048,
    "vocab_size": 262144, "max_position_embeddings": 32768, "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
    "rope_scaling": None, "sliding_window": 512, "attn_logit_softcapping": None, "final_logit_softcapping": None,
}  # fmt: skip


def test_gemma3():
    spec = spec_from_hf(GEMMA3)
    assert get_model(spec.architecture) is Gemma3
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.tie_word_embeddings) == (4, 1, 256, True)
    assert spec.windows == (512, 512, 512, 512, 512, 0) * 3
    assert (spec.rope_theta, spec.local_rope_theta, spec.query_scale) == (1e6, 1e4, 1 / 16)
    assert spec.qk_norm
    assert spec.activation == "gelu_tanh"
    assert spec.num_parameters == 268_098_176
    hash(spec)


def test_gemma3_in_other_spellings():
    want = spec_from_hf(GEMMA3)
    types = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(18)]
    flat = {key: value for key, value in GEMMA3.items() if not key.startswith("rope")}
    new = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert spec_from_hf({**flat, "rope_parameters": new, "layer_types": types}) == want
    assert spec_from_hf({**flat, "sliding_window_pattern": 6}) == want
    scaled = {**GEMMA3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {**new, "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
    assert spec_from_hf(scaled) == spec_from_hf({**flat, "rope_parameters": new})
    assert spec_from_hf(scaled).local_rotary == want.local_rotary != spec_from_hf(scaled).rotary
    assert spec_from_hf({**GEMMA3, "sliding_window_pattern": 2}).windows == (512, 0) * 9
    capped = spec_from_hf({**GEMMA3, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0})
    assert (capped.attention_soft_cap, capped.logit_soft_cap) == (50.0, 30.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "relu"}, "hidden_activation must be gelu_pytorch_tanh, got 'relu'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive number, got 0"),
        ({"sliding_window": -1}, "sliding_window must be a positive integer, got -1"),
        ({"layer_types": ["full_attention"]}, "windows must have an entry for each of 18 layers, got 1"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2}}}, "of sliding layers is not"),
    ],
)
def test_what_gemma3_may_not_be(changes, message):
    with pytest.raises(ModelLoadError, match=message):
        spec_from_hf({**GEMMA3, **changes})


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
