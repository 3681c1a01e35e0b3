"""The default model against transformers: greedy in float32, token for token, however it is served.

A pairwise choice of: one at a time or all at once, chunks of 16, 100 and 2048 tokens, pages of 8, 16 and 128 tokens, prefix
cache on or off, attention by `auto` (native code, where there is a compiler) or XLA, and a pool so small that sequences are
preempted.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.config import Config
from pagedjax.engine import Engine, from_loaded
from pagedjax.options import with_overrides
from pagedjax.weights import LoadedModel, load_model
from tests.engine.tiny import assert_clean, params, run
from tests.oracles import goldens

pytestmark = pytest.mark.model

NUM_TOKENS = 16
SHORT = 300
"""Small chunks and single rows take the prompts up to this length; the long ones would take minutes and show nothing new."""


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("default", jnp.float32)


ALONE = 3
"""Of the prompts that are served one at a time, every third: each takes seconds."""


def make_engine(
    loaded: LoadedModel, *, seqs: int, chunk: int, page: int, pages: int, cache: bool = True, backend: str = "auto"
) -> Engine:
    options = {
        "model.dtype": "float32",
        "model.max_model_len": 2048,
        "cache.page_size": page,
        "cache.num_pages": pages,
        "cache.prefix_caching": cache,
        "scheduler.max_num_seqs": seqs,
        "scheduler.max_num_batched_tokens": chunk,
        "scheduler.growth_share": 0.0,
        "runner.lane_buckets": (max(8, seqs),),
        # A single short prompt should not be padded to a whole chunk.
        "runner.token_buckets": (SHORT + 20, chunk) if seqs == 1 else (chunk,),
        "runner.max_steps": 16,
        "runner.attention_backend": backend,
        "runner.warm_up": False,
    }
    return from_loaded(loaded, with_overrides(Config(), options), progress=False)


CASES = {
    "all at once": dict(seqs=48, chunk=2048, page=16, pages=600),
    "chunks of 100, pages of 8, no cache, XLA": dict(
        seqs=48, chunk=100, page=8, pages=1200, cache=False, backend="xla"
    ),
    "chunks of 16, pages of 128": dict(seqs=8, chunk=16, page=128, pages=40),
    "one at a time, pages of 128, no cache": dict(seqs=1, chunk=2048, page=128, pages=20, cache=False),
    "preemption": dict(seqs=48, chunk=256, page=16, pages=112),
}


@pytest.mark.parametrize("name", CASES)
def test_greedy_equals_transformers(loaded, name):
    case = CASES[name]
    short = case["chunk"] == 16 or case["seqs"] == 1
    golden = [g for g in goldens.greedy().values() if not short or len(g.ids) <= SHORT]
    assert len(golden) >= 32
    golden = golden[::ALONE] if case["seqs"] == 1 else golden
    engine = make_engine(loaded, **case)
    outputs = run(engine, [g.ids for g in golden], params(max_tokens=NUM_TOKENS))
    continuations = {g.name: out.outputs[0].token_ids for g, out in zip(golden, outputs, strict=True)}
    assert all(len(ids) == NUM_TOKENS for ids in continuations.values())
    goldens.assert_all_match(continuations)
    assert (engine.counters.preemptions > 0) == (name == "preemption")
    assert_clean(engine)


def test_bfloat16_differs_by_near_ties_only(loaded):
    """With weights, activations and pages in bfloat16 the tokens are those of float32 up to near ties."""
    half = load_model("default", jnp.bfloat16)
    golden = [g for g in goldens.greedy().values() if len(g.ids) <= SHORT]
    options = {
        "model.dtype": "bfloat16",
        "model.max_model_len": 512,
        "cache.num_pages": 600,
        "scheduler.max_num_seqs": 48,
        "runner.lane_buckets": (48,),
        "runner.token_buckets": (512,),
        "runner.warm_up": False,
    }
    engine = from_loaded(half, with_overrides(Config(), options), progress=False)
    outputs = run(engine, [g.ids for g in golden], params(max_tokens=NUM_TOKENS, logprobs=0))
    agree = first_differences = 0
    for g, out in zip(golden, outputs, strict=True):
        ids = out.outputs[0].token_ids
        same = next((i for i, (a, b) in enumerate(zip(ids, g.tokens, strict=False)) if a != b), NUM_TOKENS)
        agree += same
        if same < NUM_TOKENS:
            first_differences += 1
            # Rounding moves log-probabilities by a few hundredths; both tokens were within that of each other.
            assert g.margins[same] < 0.35, (g.name, same, g.margins[same])
    assert agree > 0.75 * NUM_TOKENS * len(golden)


def test_prompt_logprobs_equal_transformers(loaded):
    engine = make_engine(loaded, **CASES["chunks of 100, pages of 8, no cache, XLA"])
    by_name = goldens.greedy()
    for name, golden in goldens.prompt_logprobs().items():
        ids = by_name[name].ids
        out = run(engine, [ids], params(max_tokens=1, prompt_logprobs=5))[0]
        assert out.prompt_logprobs[0] is None
        ours = [entry.chosen.logprob for entry in out.prompt_logprobs[1:]]
        np.testing.assert_allclose(ours, golden["logprobs"], atol=2e-3)
        assert sum(e.chosen.rank != r for e, r in zip(out.prompt_logprobs[1:], golden["ranks"], strict=True)) <= 1
