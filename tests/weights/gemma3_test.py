"""Gemma 3 270M in float32 against transformers: tokens, logits, log-probabilities on both sides of the window."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from pagedjax.weights import load_model
from tests.models.harness import PagedRun
from tests.oracles import goldens

pytestmark = pytest.mark.model

# Computed by llama.cpp and by the model's own tokenizer.
IDS = {
    "The capital of France is": [2, 818, 5279, 529, 7001, 563],
    " two  spaces": [2, 1156, 138, 35220],
    "1234567 + 89": [2, 236770, 236778, 236800, 236812, 236810, 236825, 236832, 900, 236743, 236828, 236819],
    "naïve café": [2, 1789, 238527, 560, 33443],
    "日本語のテキスト": [2, 94951, 236945, 95830],
    "👩\u200d🚀🇨🇿": [2, 243767, 237243, 242015, 245744, 246679],
    "def f(x):\n\treturn x**2\n": [2, 2063, 517, 236769, 236781, 1473, 107, 255968, 2060, 1123, 1018, 236778, 107],
}


@pytest.fixture(scope="module")
def loaded():
    return load_model("gemma3-270m", "float32")


@pytest.fixture(scope="module")
def run(loaded):
    return PagedRun(loaded.model, num_rows=1, max_tokens=1328, page_size=16)


def logits_of(run: PagedRun, ids, pad_to: int = 720) -> np.ndarray:
    """In two chunks where they are many: what is behind the windows is poisoned when the second one comes."""
    run.lengths = np.zeros(1, np.int32)
    ids = list(ids)
    parts = [run.feed([ids[i : i + pad_to]], pad_to=pad_to)[0] for i in range(0, len(ids), pad_to)]
    return np.concatenate(parts)


def test_what_was_loaded(loaded):
    spec = loaded.spec
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (18, 640, 4, 1, 256)
    assert (spec.vocab_size, spec.max_position_embeddings, spec.num_parameters) == (262_144, 32_768, 268_098_176)
    assert spec.windows == (512, 512, 512, 512, 512, 0) * 3
    assert (spec.rope_theta, spec.local_rope_theta, spec.query_scale) == (1e6, 1e4, 1 / 16)
    assert (loaded.name, loaded.eos_token_ids) == ("gemma-3-270m", (1, 106))
    assert loaded.chat_template is None


def test_tokenizer(loaded):
    for text, ids in IDS.items():
        assert loaded.encode(text) == ids
        assert loaded.tokenizer.decode(ids, skip_special_tokens=True) == text
    for case in goldens.strings("gemma3"):
        assert loaded.tokenizer.encode(case["text"]) == case["ids"], case["text"]
        assert loaded.tokenizer.decode(case["ids"]) == case["decoded"]


@pytest.mark.parametrize("name", ["text/capital", "long/1300"])
def test_last_logits(run, name):
    golden = goldens.last_logits("gemma3")[name]
    logits = logits_of(run, goldens.greedy("gemma3")[name].ids)[-1]
    np.testing.assert_allclose(logits[golden["ids"]], golden["logits"], atol=2e-3)
    np.testing.assert_allclose(float(jax.nn.logsumexp(logits)), golden["logsumexp"], atol=2e-3)


@pytest.mark.parametrize("name", ["text/capital", "cut/700"])
def test_prompt_logprobs(run, name):
    golden, ids = goldens.prompt_logprobs("gemma3")[name], goldens.greedy("gemma3")[name].ids
    table = np.asarray(jax.nn.log_softmax(logits_of(run, ids)[:-1], axis=-1))
    chosen = table[np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(chosen, golden["logprobs"], atol=2e-3)
    top = np.take_along_axis(table, np.array(golden["top_ids"]), axis=-1)
    np.testing.assert_allclose(top, golden["top_logprobs"], atol=2e-3)
