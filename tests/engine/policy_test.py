"""Policies on a real engine: they change when something is computed, never what."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pagedjax import Request
from pagedjax.config import Config
from pagedjax.engine import build_engine
from pagedjax.engine.llm import merge
from pagedjax.errors import ConfigError
from pagedjax.policy import POLICIES
from tests.engine.tiny import assert_clean, greedy, make_engine, params, random_prompts

PROMPTS = random_prompts(12, 1, 60, seed=11)


def serve(engine, requests):
    """Ids in the order in which they ended, and each one's tokens."""
    done, ended = {}, []
    for request in requests:
        engine.add_request(request)
    for _ in range(10_000):
        if not engine.has_unfinished():
            break
        for delta in engine.step():
            done[delta.request_id] = merge(done.get(delta.request_id), delta)
            ended += [delta.request_id] if delta.finished else []
    assert_clean(engine)
    return ended, {i: out.outputs[0].token_ids for i, out in done.items()}


def mixed_requests():
    """Of three tenants, with all priorities and deadlines that never come."""
    return [
        Request(str(i), p, params(), priority=i % 3 - 1, tenant="abc"[i % 3], deadline=[None, 5000.0 - i][i % 2])
        for i, p in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_changes_no_token(policy):
    """In a pool of 80 tokens, where most are preempted at some time; then once more, with a warm prefix cache."""
    engine = make_engine(cache__num_pages=11, scheduler__policy=policy)
    for _ in range(2):
        _, tokens = serve(engine, mixed_requests())
        assert tokens == {str(i): greedy(p, 12) for i, p in enumerate(PROMPTS)}
    assert engine.counters.preemptions > 0


def test_a_policy_that_was_added_is_used():
    POLICIES["last_come"] = lambda features: -features.arrival.astype(np.float32)
    try:
        engine = make_engine(scheduler__policy="last_come")
    finally:
        del POLICIES["last_come"]
    ended, _ = serve(engine, [Request(str(i), p, params(max_tokens=2)) for i, p in enumerate(PROMPTS)])
    assert set(ended[:8]) == {str(i) for i in range(4, 12)}  # eight rows


def test_a_policy_that_is_not_there_is_named_before_the_model_is_loaded():
    scheduler = dataclasses.replace(Config().scheduler, policy="lifo")
    model = dataclasses.replace(Config().model, path="/nowhere")
    with pytest.raises(ConfigError, match=r"config\.scheduler\.policy: must be one of first_come.*got 'lifo'"):
        build_engine(dataclasses.replace(Config(), scheduler=scheduler, model=model))


def test_fair_share_lets_a_light_tenant_through():
    """Forty requests of one tenant wait, then one of another comes: it is among the first eight to be answered after it."""
    answered = {}
    for policy in ("first_come", "fair_share"):
        engine = make_engine(scheduler__policy=policy)
        for i in range(40):
            engine.add_request(Request(f"heavy{i}", PROMPTS[i % 12], params(max_tokens=6), tenant="heavy"))
        for _ in range(3):
            engine.step()
        ended, _ = serve(engine, [Request("light", PROMPTS[0], params(max_tokens=6), tenant="light")])
        answered[policy] = ended.index("light")
    assert answered["fair_share"] < 16 < answered["first_come"]
