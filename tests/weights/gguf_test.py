"""GGUF files as models: names, row order, metadata, rotary scalings, and what is refused."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from flax import nnx
from gguf import GGMLQuantizationType as Kind

from pagedjax.errors import ModelLoadError
from pagedjax.models import get_model
from pagedjax.nn import rotary_table
from pagedjax.weights import load_model
from pagedjax.weights.gguf import read_gguf
from pagedjax.weights.gguf_file import GGUFFile
from tests.models.harness import random_checkpoint
from tests.weights.files import block_spec, write_gguf

GEMMA3 = {
    "architecture": "Gemma3ForCausalLM",
    "num_layers": 7,
    "qk_norm": True,
    "tie_word_embeddings": True,
    "windows": (8, 8, 8, 8, 8, 0, 8),
    "rope_theta": 1e6,
    "local_rope_theta": 1e4,
    "query_scale": 16**-0.5,
    "activation": "gelu_tanh",
}
VARIANTS = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {"architecture": "Qwen2ForCausalLM", "attention_bias": True}),
    "qwen3": ("qwen3", {"architecture": "Qwen3ForCausalLM", "qk_norm": True}),
    "gemma3": ("gemma3", GEMMA3),
}


def same_parameters(a, b) -> bool:
    a, b = nnx.to_pure_dict(nnx.state(a)), nnx.to_pure_dict(nnx.state(b))
    return jax.tree.structure(a) == jax.tree.structure(b) and jax.tree.all(
        jax.tree.map(lambda x, y: x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes(), a, b)
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_float32_file_is_the_checkpoint(tmp_path, name):
    architecture, changes = VARIANTS[name]
    spec = block_spec(**changes)
    tensors = random_checkpoint(spec)
    loaded = load_model(write_gguf(tmp_path / "m.gguf", spec, tensors, architecture=architecture), "float32")
    assert loaded.spec == spec
    assert same_parameters(loaded.model, get_model(spec.architecture).load(spec, tensors, "float32"))
    assert (loaded.name, loaded.eos_token_ids) == ("m", (2,))


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_quantised_file_is_near_the_checkpoint(tmp_path, kind):
    spec = block_spec()
    tensors = random_checkpoint(spec)
    _, got = read_gguf(GGUFFile(write_gguf(tmp_path / "m.gguf", spec, tensors, kind=kind)))
    assert set(got) == set(tensors)
    for name, want in tensors.items():
        off = np.abs(got[name].astype(np.float32) - want).max()
        assert off <= np.abs(want).max() * (0.15 if kind.name.startswith("Q4") else 0.01), name


def spec_with(tmp_path, keys=None, extra=None, **changes):
    spec = block_spec(**changes)
    path = write_gguf(tmp_path / "m.gguf", spec, random_checkpoint(spec), keys=keys, extra=extra, tokenizer=False)
    return read_gguf(GGUFFile(path))[0]


def test_rotary_scalings(tmp_path):
    linear = spec_with(tmp_path, {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    assert linear.rotary == rotary_table(16, 10000.0, {"rope_type": "linear", "factor": 4.0}, 256)
    old = spec_with(tmp_path, {"llama.rope.scale_linear": 2.0})
    assert old.rotary == rotary_table(16, 10000.0, {"rope_type": "linear", "factor": 2.0}, 256)
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    got = spec_with(tmp_path, {f"llama.rope.scaling.{key}": value for key, value in yarn.items()})
    want = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert got.rotary == rotary_table(16, 10000.0, want, 256)
    halved = {**yarn, "attn_factor": 0.5}
    got = spec_with(tmp_path, {f"llama.rope.scaling.{key}": value for key, value in halved.items()})
    assert math.isclose(got.rotary.attention_factor, 0.5 * (1 + 0.1 * math.log(4)))


def test_gemma3_says_what_differs(tmp_path):
    spec = block_spec(**GEMMA3)
    tensors = random_checkpoint(spec)

    def read(**keys):
        keys = {f"gemma3.{key}": value for key, value in keys.items()}
        path = write_gguf(tmp_path / "m.gguf", spec, tensors, architecture="gemma3", keys=keys, tokenizer=False)
        return read_gguf(GGUFFile(path))[0]

    assert read(**{"attention.sliding_window_pattern": 2}).windows == (8, 0, 8, 0, 8, 0, 8)
    scaled = read(**{"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base_swa": 5e3})
    assert scaled.rotary == rotary_table(16, 1e6, {"rope_type": "linear", "factor": 8.0}, 256)
    assert scaled.local_rotary == rotary_table(16, 5e3, None, 256)
    assert read(final_logit_softcapping=30.0).logit_soft_cap == 30.0
    with pytest.raises(ModelLoadError, match=r"attention\.sliding_window must be a positive integer, got None"):
        read(**{"attention.sliding_window": None})


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("context", [8192, 1000])
@pytest.mark.parametrize(("low", "high"), [(1.0, 4.0), (1.0, 8.0), (2.0, 6.0)])
def test_llama3_scaling_is_recovered_from_its_factors(tmp_path, factor, context, low, high):
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }
    plain, want = rotary_table(128, 5e5, None, 256), rotary_table(128, 5e5, scaling, 256)
    factors = (np.array(plain.inv_freq) / np.array(want.inv_freq)).astype(np.float32)
    got = spec_with(tmp_path, extra={"rope_freqs.weight": factors}, head_dim=128, rope_theta=5e5)
    np.testing.assert_allclose(got.rotary.inv_freq, want.inv_freq, rtol=2e-5)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"general.architecture": "bloom"},
            "unsupported GGUF architecture 'bloom'; supported are llama, qwen2, qwen3, gemma3",
        ),
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"llama.block_count": 3}, "3 layers by the metadata"),
        ({"llama.block_count": None}, "block_count must be a positive integer, got None"),
        ({"llama.attention.head_count": "four"}, "head_count has an unusable value"),
        ({"llama.attention.head_count": 5}, "must have shape"),
        ({"llama.attention.key_length": 1 << 30, "llama.attention.value_length": 1 << 30}, "must have shape"),
        ({"llama.feed_forward_length": 1 << 31}, "must have shape"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count = 8 differs from the head size 16"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.freq_base": math.nan}, "finite number"),
    ],
)
def test_refused_metadata(tmp_path, keys, message):
    with pytest.raises(ModelLoadError, match=message) as raised:
        spec_with(tmp_path, keys)
    assert "m.gguf" in str(raised.value)


def test_unknown_and_missing_tensors_are_named(tmp_path):
    with pytest.raises(ModelLoadError, match=r"no supported model has: blk\.0\.ssm_a"):
        spec_with(tmp_path, extra={"blk.0.ssm_a": np.zeros(4, np.float32)})
    with pytest.raises(ModelLoadError, match=r"rope_freqs\.weight must hold 8 factors"):
        spec_with(tmp_path, extra={"rope_freqs.weight": np.ones(5, np.float32)})
    with pytest.raises(ModelLoadError, match="does not follow a known rotary scaling"):
        spec_with(tmp_path, extra={"rope_freqs.weight": np.array([1, 9, 1, 9, 1, 9, 1, 9], np.float32)})
    spec = block_spec()
    tensors = random_checkpoint(spec)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelLoadError, match=r"m\.gguf.*layers\.1\.mlp\.up_proj\.weight"):
        load_model(write_gguf(tmp_path / "m.gguf", spec, tensors), "float32")
