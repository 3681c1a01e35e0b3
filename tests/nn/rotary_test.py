"""Rotary embeddings and their scalings against formulas written apart from them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.nn import apply_rotary, rotary_table
from tests.oracles import llama_oracle

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SCALINGS = {
    "none": None,
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear, old key": {"type": "linear", "factor": 4.0},
    "llama3 x 8": {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
    "llama3 x 32": {"rope_type": "llama3", "factor": 32.0, **LLAMA3},
    "llama3, old key": {"type": "llama3", "factor": 8, **LLAMA3},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    "yarn, old key": {"type": "yarn", "factor": 16.0, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn, attention factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5},
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", SCALINGS)
def test_rotation_equals_the_oracle_at_every_position(name, head_dim):
    scaling = SCALINGS[name]
    x = np.random.default_rng(0).normal(size=(6, 2, head_dim)).astype(np.float32)
    positions = np.array([0, 1, 15, 1000, 8000, 131071])
    inv_freq, factor = llama_oracle.inverse_frequencies(head_dim, 500000.0, scaling, 4096)
    want = llama_oracle.rotate(x.astype(np.float64), positions, inv_freq, factor)
    table = rotary_table(head_dim, 500000.0, scaling, 4096)
    np.testing.assert_allclose(table.inv_freq, inv_freq, rtol=1e-12)
    got = jax.jit(lambda x, p: apply_rotary(x, p, table))(jnp.asarray(x), jnp.asarray(positions, jnp.int32))
    # The angle is a float32: half an ulp of it is what an element may be off by, times its own size.
    ulp = np.maximum(positions, 1)[:, None, None] * 1.5e-7
    assert (np.abs(got - want) <= 6 * ulp + 1e-6).all()


@pytest.mark.smoke
def test_the_factor_is_read():
    tables = {f: rotary_table(64, 10000.0, {"rope_type": "llama3", **LLAMA3, "factor": f}, 8192) for f in (8.0, 32.0)}
    assert tables[8.0].inv_freq[-1] == pytest.approx(4 * tables[32.0].inv_freq[-1])
    assert tables[8.0].inv_freq[0] == tables[32.0].inv_freq[0] == 1


def test_yarn_takes_its_factor_from_the_contexts_where_it_has_none():
    told = {"rope_type": "yarn", "original_max_position_embeddings": 1024, "factor": 8.0}
    silent = {**told, "factor": None}
    assert rotary_table(64, 1e4, told, 8192) == rotary_table(64, 1e4, silent, 8192)


def test_yarn_magnitude_by_mscale():
    table = rotary_table(64, 1e4, {"type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8}, 4096)
    want = (0.1 * np.log(40) + 1) / (0.08 * np.log(40) + 1)
    assert table.attention_factor == pytest.approx(want)


def test_16_bit_inputs_are_rotated_in_float32():
    x = jnp.ones((1, 1, 64), jnp.bfloat16)
    out = apply_rotary(x, jnp.asarray([8001], jnp.int32), rotary_table(64, 1e4, None, 8192))
    assert out.dtype == jnp.bfloat16
    want = np.cos(8001.0) - np.sin(8001.0)
    assert abs(float(out[0, 0, 0]) - want) < 2**-8 * abs(want)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (
            {"rope_type": "dynamic", "factor": 2.0},
            "rope_type must be one of default, linear, llama3, yarn; got 'dynamic'",
        ),
        ({"type": "linear"}, "of type 'linear' needs 'factor'"),
        ({"type": "linear", "factor": -1.0}, "factor must be a positive number, got -1.0"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "needs 'high_freq_factor'"),
        ({"rope_type": "llama3", **LLAMA3, "factor": 8.0, "low_freq_factor": 4.0}, "must be above low_freq_factor = 4"),
    ],
)
def test_bad_scalings_are_named(scaling, message):
    with pytest.raises(ValueError, match=message):
        rotary_table(64, 10000.0, scaling, 4096)


def test_odd_head_dims_are_refused():
    with pytest.raises(ValueError, match="even"):
        rotary_table(63, 10000.0, None, 4096)
