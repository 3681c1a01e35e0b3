"""Sizes of models: published numbers of parameters, and those that loading makes."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from pagedjax.models import Llama
from pagedjax.models.shapes import REFERENCE_SHAPES, shape_of
from tests.models.harness import tiny_spec

PUBLISHED = {
    "opt-13b": 12_853_473_280,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
}


@pytest.mark.parametrize("name", REFERENCE_SHAPES)
def test_parameters_of_published_models(name):
    shape = REFERENCE_SHAPES[name]
    if name in PUBLISHED:
        assert shape.num_parameters() == PUBLISHED[name]
    billions = float(name.rsplit("-", 1)[1].removesuffix("b"))
    assert shape.num_parameters() == pytest.approx(billions * 1e9, rel=0.05)


@pytest.mark.parametrize(
    "changes",
    [{}, {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}],
)
def test_parameters_are_those_that_loading_makes(changes):
    spec = tiny_spec(**changes)
    model = nnx.eval_shape(lambda: Llama(spec, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    made = sum(x.size for x in jax.tree.leaves(nnx.state(model)))
    assert shape_of(spec, "tiny").num_parameters() == made


def test_parameters_on_each_of_several_devices():
    shape = REFERENCE_SHAPES["llama-3-70b"]
    norms = 80 * 2 * 8192 + 8192
    assert shape.num_parameters(8) == (shape.num_parameters() - norms) // 8 + norms
    # With more devices than KV heads, each has one with its query heads; the rest divides on.
    heads, each = next(part for part in shape.parts if part[0] == 8)
    assert heads == 8
    less = shape.num_parameters(16) - norms
    halved = (shape.num_parameters(8) - norms) // 2
    assert less - halved == sum(size - size // 2 for units, size in shape.parts if units == 8)
    assert each == 80 * 8192 * 10 * 128
