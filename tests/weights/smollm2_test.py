"""The default model in float32 against transformers' logits and log-probabilities."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from pagedjax.weights import load_model
from tests.models.harness import PagedRun
from tests.oracles import goldens

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def loaded():
    return load_model("default", "float32")


@pytest.fixture(scope="module")
def run(loaded):
    return PagedRun(loaded.model, num_rows=1, max_tokens=272, page_size=16)


def logits_of(run: PagedRun, ids) -> np.ndarray:
    run.lengths = np.zeros(1, np.int32)
    return run.feed([list(ids)], pad_to=257)[0]


def test_what_was_loaded(loaded):
    spec = loaded.spec
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads) == (30, 576, 9, 3)
    assert (spec.vocab_size, spec.rope_theta, spec.max_position_embeddings) == (49152, 1e5, 8192)
    assert spec.tie_word_embeddings
    assert (loaded.name, loaded.eos_token_ids) == ("SmolLM2-135M-Instruct", (goldens.eos_token_id(),))
    assert loaded.encode_chat([{"role": "user", "content": "What is the capital of France?"}]) == list(
        goldens.greedy()["chat/paris"].ids
    )


def test_last_logits(run):
    golden = goldens.last_logits()["text/capital"]
    logits = logits_of(run, goldens.greedy()["text/capital"].ids)[-1]
    np.testing.assert_allclose(logits[golden["ids"]], golden["logits"], atol=1e-3)
    np.testing.assert_allclose(float(jax.nn.logsumexp(logits)), golden["logsumexp"], atol=1e-3)


@pytest.mark.parametrize("name", ["text/capital", "chat/turns", "cut/257"])
def test_prompt_logprobs(run, name):
    golden, ids = goldens.prompt_logprobs()[name], goldens.greedy()[name].ids
    table = np.asarray(jax.nn.log_softmax(logits_of(run, ids)[:-1], axis=-1))
    chosen = table[np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(chosen, golden["logprobs"], atol=1e-3)
    top = np.take_along_axis(table, np.array(golden["top_ids"]), axis=-1)
    np.testing.assert_allclose(top, golden["top_logprobs"], atol=1e-3)
    assert np.abs((table > chosen[:, None]).sum(-1) + 1 - np.array(golden["ranks"])).max() <= 3


def test_greedy_with_the_stored_tokens_fed_in(run):
    """One pass over prompt and answer: every stored token is our argmax too, but for near ties."""
    for name in ("text/story", "chat/paris", "text/japanese", "random/33", "cut/129"):
        golden = goldens.greedy()[name]
        logits = logits_of(run, (*golden.ids, *golden.tokens[:-1]))[len(golden.ids) - 1 :]
        for step, best in enumerate(logits.argmax(-1)):
            near_tie = golden.margins[step] < goldens.NEAR_TIE_F32 and int(best) == golden.runners_up[step]
            assert int(best) == golden.tokens[step] or near_tie, (name, step)
