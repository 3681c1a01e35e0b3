"""Log-probabilities of generated and prompt tokens, and what of them leaves the process."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.sampling import MIN_LOGPROB, host_logprobs, prompt_logprobs
from pagedjax.types import MAX_LOGPROBS, SamplingParams
from tests.oracles import sampling_oracle as oracle
from tests.sampling.helpers import R, run

V = 300


def test_they_are_the_models_own():
    """Before penalties, bias and temperature; for all lanes as soon as one asks."""
    logits = np.random.default_rng(0).normal(size=(R, V)).astype(np.float32) * 3
    sampling = SamplingParams(temperature=1.7, logprobs=5, logit_bias={3: 100.0}, repetition_penalty=2.0, top_k=4)
    out = run(logits, [sampling] * R, prompts=[[1, 2, 3]] * R)
    assert out.tokens.tolist() == [3] * R
    for i in range(R):
        logprob, rank, top_ids, top = oracle.logprobs(logits[i], 3, MAX_LOGPROBS)
        np.testing.assert_allclose(out.logprobs[i], logprob, atol=1e-5)
        np.testing.assert_allclose(out.top_logprobs[i], top, atol=1e-5)
        assert (int(out.ranks[i]), out.top_ids[i].tolist()) == (rank, top_ids)


def test_nobody_asked():
    out = run(np.ones((2, V), np.float32), [SamplingParams()] * 2)
    assert not out.logprobs.any()
    assert not out.top_ids.any()


def test_prompt_logprobs_with_ties():
    logits = np.round(np.random.default_rng(1).normal(size=(17, V))).astype(np.float32)
    next_ids = np.random.default_rng(2).integers(0, V, 17).astype(np.int32)
    out = jax.jit(prompt_logprobs)(jnp.asarray(logits), jnp.asarray(next_ids))
    for i in range(17):
        logprob, rank, top_ids, top = oracle.logprobs(logits[i], next_ids[i], MAX_LOGPROBS)
        np.testing.assert_allclose(out.logprobs[i], logprob, atol=1e-5)
        np.testing.assert_allclose(out.top_logprobs[i], top, atol=1e-5)
        assert (int(out.ranks[i]), out.top_ids[i].tolist()) == (rank, top_ids)


def test_small_vocabulary():
    out = prompt_logprobs(jnp.zeros((2, 5)), jnp.asarray([0, 4], jnp.int32))
    assert out.top_ids.shape == (2, MAX_LOGPROBS)
    assert out.top_ids[0].tolist() == [0, 1, 2, 3, 4] + [5] * (MAX_LOGPROBS - 5)
    assert out.ranks.tolist() == [1, 5]
    entry = host_logprobs(
        4, out.logprobs[1], out.ranks[1], np.asarray(out.top_ids[1]), np.asarray(out.top_logprobs[1]), 20
    )
    assert len(entry.top) == 5
    assert all(math.isclose(p.logprob, -math.log(5), rel_tol=1e-6) for p in entry.top)


def test_nothing_infinite_leaves():
    logits = np.full((1, V), -np.inf, np.float32)
    logits[0, :3] = [1.0, 2.0, 3.0]
    next_ids = jnp.asarray([9], jnp.int32)
    out = jax.tree.map(lambda x: np.asarray(x)[0], prompt_logprobs(jnp.asarray(logits), next_ids))
    assert np.isneginf(out.logprobs)
    entry = host_logprobs(9, out.logprobs, out.ranks, out.top_ids, out.top_logprobs, 5)
    assert [(p.token_id, p.rank) for p in entry.top] == [(2, 1), (1, 2), (0, 3)]
    assert entry.chosen.logprob == MIN_LOGPROB
    json.dumps([entry.chosen.logprob, *[p.logprob for p in entry.top]], allow_nan=False)
    broken = host_logprobs(9, float("nan"), 1, out.top_ids, np.full(20, np.nan), 20)
    assert (broken.chosen.logprob, broken.top) == (MIN_LOGPROB, ())
