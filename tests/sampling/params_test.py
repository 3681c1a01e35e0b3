"""From what a client asks for to arrays; counts of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.errors import InvalidRequestError
from pagedjax.sampling import (
    add_tokens,
    check_vocabulary,
    init_row_sampling,
    init_token_counts,
    reset_counts,
    row_values,
    set_rows,
    stack_rows,
    uses_counts,
)
from pagedjax.sampling.penalties import PROMPT_BIT
from pagedjax.types import MAX_LOGIT_BIAS, SamplingParams

V = 50


def values(vocab_size=V, eos=(2, 3), seed=9, **asked):
    return row_values(SamplingParams(**asked), vocab_size=vocab_size, eos_token_ids=eos, seed=seed)


def test_one_row():
    row = values(top_k=7, top_p=0.5, stop_token_ids=[4, 2, 4], logit_bias={"6": 200}, logprobs=0)
    assert row.seed.tolist() == [0, 9]
    assert row.stop_ids.tolist() == [2, 3, 4] + [V] * 37
    assert row.held_ids.tolist() == row.stop_ids.tolist()
    assert (row.bias_ids[:2].tolist(), row.bias_values[:2].tolist()) == ([6, V], [100.0, 0.0])
    assert (row.top_k, row.num_logprobs, values().num_logprobs) == (7, 0, -1)


def test_ignored_eos_does_not_stop_but_is_held_back():
    row = values(ignore_eos=True, stop_token_ids=[4])
    assert row.stop_ids[:2].tolist() == [4, V]
    assert row.held_ids[:4].tolist() == [2, 3, 4, V]


def test_top_k_of_the_vocabulary_or_more_is_off():
    assert [int(values(top_k=k).top_k) for k in (0, -1, V - 1, V, V + 1)] == [0, 0, V - 1, 0, 0]


@pytest.mark.parametrize(
    ("seed", "halves"), [(1, [0, 1]), (1 + 2**32, [1, 1]), (-1, [2**32 - 1] * 2), (2**64 - 1, [2**32 - 1] * 2)]
)
def test_seeds_keep_64_bits(seed, halves):
    row = row_values(SamplingParams(seed=seed), vocab_size=V, seed=0)
    assert row.seed.tolist() == halves


@pytest.mark.parametrize(
    ("asked", "field", "part"),
    [
        ({"logit_bias": {V: 1}}, "logit_bias", "token id 50"),
        ({"stop_token_ids": [1, V + 3]}, "stop_token_ids", "token id 53"),
    ],
)
def test_ids_outside_the_vocabulary(asked, field, part):
    for attempt in (lambda: values(**asked), lambda: check_vocabulary(SamplingParams(**asked), V)):
        with pytest.raises(InvalidRequestError, match=part) as caught:
            attempt()
        assert caught.value.field == field


def test_too_much_for_a_row():
    with pytest.raises(InvalidRequestError, match="stop_token_ids: at most 40 ids"):
        values(eos=range(40), stop_token_ids=[41])
    with pytest.raises(InvalidRequestError, match="logit_bias: at most 3 entries, got 4"):
        row_values(SamplingParams(logit_bias=dict.fromkeys(range(4), 1.0)), vocab_size=V, seed=0, num_bias=3)
    with pytest.raises(InvalidRequestError, match="min_tokens: all 3 tokens"):
        values(vocab_size=3, eos=range(3), min_tokens=1)
    assert values(logit_bias=dict.fromkeys(range(V), 1.0)).bias_ids.shape == (MAX_LOGIT_BIAS,)


def test_set_rows_touches_only_its_rows():
    params = init_row_sampling(4, V)
    new = stack_rows([values(temperature=0.5), values(min_p=0.5)], 3)
    out = jax.jit(set_rows)(params, jnp.asarray([3, 1, 4], jnp.int32), new)
    assert out.temperature.tolist() == [0.0, 1.0, 0.0, 0.5]
    assert out.min_p.tolist() == [0.0, 0.5, 0.0, 0.0]
    for before, after in zip(params, out, strict=True):
        assert before.dtype == after.dtype
        assert np.array_equal(before[0], after[0])
        assert np.array_equal(before[2], after[2])


def test_stack_rows_wants_a_fitting_width():
    with pytest.raises(ValueError, match="width = 1"):
        stack_rows([values(), values()], 1)


def test_counts():
    counts = init_token_counts(3, V).at[1].set(7)
    ids = jnp.asarray([[5, 5, 6, 6, 6, 9], [1, 0, 0, 0, 0, 0]], jnp.int32)
    reset = jax.jit(reset_counts, donate_argnums=0)
    counts = reset(
        counts, jnp.asarray([1, 3], jnp.int32), ids, jnp.asarray([3, 1], jnp.int32), jnp.asarray([5, 1], jnp.int32)
    )
    expected = np.zeros((3, V), np.int64)
    expected[1, 5], expected[1, 6] = PROMPT_BIT, PROMPT_BIT + 2
    assert np.array_equal(counts, expected)
    counts = jax.jit(add_tokens, donate_argnums=0)(
        counts, jnp.asarray([1, 0, 3], jnp.int32), jnp.asarray([6, 8, 8], jnp.int32)
    )
    expected[1, 6] += 1
    expected[0, 8] += 1
    assert np.array_equal(counts, expected)


@pytest.mark.parametrize("update", ["add", "reset"])
def test_counts_are_updated_in_place(update):
    counts = jax.ShapeDtypeStruct((64, 50_000), jnp.int32)
    rows = jax.ShapeDtypeStruct((8,), jnp.int32)
    if update == "add":
        lowered = jax.jit(add_tokens, donate_argnums=0).lower(counts, rows, rows)
    else:
        ids = jax.ShapeDtypeStruct((8, 128), jnp.int32)
        lowered = jax.jit(reset_counts, donate_argnums=0).lower(counts, rows, ids, rows, rows)
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 64 * 50_000 * 4
    assert memory.temp_size_in_bytes < 4e6


def test_uses_counts():
    assert not uses_counts(SamplingParams(logit_bias={1: 1.0}, min_tokens=3))
    for name, value in (("presence_penalty", 0.1), ("frequency_penalty", -1), ("repetition_penalty", 1.1)):
        assert uses_counts(SamplingParams(**{name: value}))
