"""Gemma 3 270M against transformers: greedy in float32, on both sides of its 512-token window, however it is served.

All at once; in chunks of 100 with pages of 32; and with a sequence preempted every few steps. Prompts are 6 to 1,300
tokens; pages behind the window are given back while the long ones run.
"""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from pagedjax import Request
from pagedjax.config import Config
from pagedjax.engine import Engine, from_loaded
from pagedjax.engine.llm import merge
from pagedjax.options import with_overrides
from pagedjax.weights import LoadedModel, load_model
from tests.engine.tiny import assert_clean, params, run
from tests.oracles import goldens

pytestmark = [pytest.mark.model, pytest.mark.slow]

NUM_TOKENS = 16


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("gemma3-270m", jnp.float32)


def make_engine(loaded: LoadedModel, *, chunk: int, page: int, pages: int, cache: bool = True) -> Engine:
    options = {
        "model.dtype": "float32",
        "model.max_model_len": 1344,
        "cache.page_size": page,
        "cache.num_pages": pages,
        "cache.prefix_caching": cache,
        "scheduler.max_num_seqs": 8,
        "scheduler.max_num_batched_tokens": chunk,
        "scheduler.growth_share": 0.0,
        "runner.lane_buckets": (8,),
        "runner.token_buckets": (chunk,),
        "runner.max_steps": 16,
        "runner.warm_up": False,
    }
    return from_loaded(loaded, with_overrides(Config(), options), progress=False)


CASES = {
    "all at once": dict(chunk=512, page=16, pages=2400),
    "chunks of 100, pages of 32, no cache": dict(chunk=100, page=32, pages=1200, cache=False),
    "preemption": dict(chunk=512, page=16, pages=2400),
}


def run_with_preemptions(engine: Engine, prompts) -> list:
    """`run`, with the youngest sequence preempted after every second step until the requests have no more to lose."""
    for i, prompt in enumerate(prompts):
        engine.add_request(Request(str(i), tuple(prompt), params(max_tokens=NUM_TOKENS)))
    done, steps = {}, 0
    while engine.has_unfinished():
        for delta in engine.step():
            done[delta.request_id] = merge(done.get(delta.request_id), delta)
        steps += 1
        if steps % 2 == 0 and steps <= 20 and engine.stats().num_running:
            engine._preempt()
    return [done[str(i)] for i in range(len(prompts))]


@pytest.mark.parametrize("name", CASES)
def test_greedy_equals_transformers(loaded, name):
    golden = list(goldens.greedy("gemma3").values())
    assert {len(g.ids) > 512 for g in golden} == {True, False}
    engine = make_engine(loaded, **CASES[name])
    prompts = [g.ids for g in golden]
    if name == "preemption":
        outputs = run_with_preemptions(engine, prompts)
    else:
        outputs = run(engine, prompts, params(max_tokens=NUM_TOKENS))
    continuations = {g.name: out.outputs[0].token_ids for g, out in zip(golden, outputs, strict=True)}
    assert all(len(ids) == NUM_TOKENS for ids in continuations.values())
    goldens.assert_all_match(continuations, model="gemma3")
    assert (engine.counters.preemptions > 0) == (name == "preemption")
    assert_clean(engine)


def test_a_hit_on_a_long_prefix(loaded):
    """The same 1,300 tokens twice, then the first 700 of them: the cache has the prefix in all groups."""
    engine = make_engine(loaded, **CASES["all at once"])
    golden = goldens.greedy("gemma3")["long/1300"]
    first, again = (run(engine, [golden.ids], params(max_tokens=NUM_TOKENS))[0] for _ in range(2))
    goldens.assert_all_match({"long/1300": first.outputs[0].token_ids}, model="gemma3")
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert again.num_cached_tokens == 1296
    shorter = run(engine, [golden.ids[:700]], params(max_tokens=1))[0]
    assert shorter.num_cached_tokens == 688
    assert_clean(engine)
