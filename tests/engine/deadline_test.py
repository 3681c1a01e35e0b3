"""Deadlines end requests, begun or not, under every policy, and leave no page behind."""

from __future__ import annotations

import pytest

from pagedjax import LLM, Request
from pagedjax.engine.llm import merge
from pagedjax.errors import InvalidRequestError
from pagedjax.policy import POLICIES
from pagedjax.types import FinishReason
from tests.engine.tiny import assert_clean, greedy, make_engine, params, random_prompts

PROMPTS = random_prompts(9, 5, 12, seed=50)


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def clocked(**overrides):
    engine, clock = make_engine(**overrides), Clock()
    engine._scheduler.clock = clock
    return engine, clock


def finish(engine, done=None, steps=10_000):
    """Run to the end; what came of each request."""
    done = {} if done is None else done
    for _ in range(steps):
        if not engine.has_unfinished():
            break
        for delta in engine.step():
            done[delta.request_id] = merge(done.get(delta.request_id), delta)
    return done


@pytest.mark.parametrize("policy", POLICIES)
def test_what_has_not_begun_and_what_runs_are_ended(policy):
    """Eight rows: the ninth request waits, but for the policy that puts it first. Every other one has a deadline."""
    engine, clock = clocked(scheduler__policy=policy)
    for i, prompt in enumerate(PROMPTS[:8]):
        engine.add_request(Request(str(i), prompt, params(max_tokens=40), priority=-1, deadline=5.0 if i % 2 else None))
    engine.add_request(Request("last", PROMPTS[8], params(max_tokens=40), deadline=4.0))
    done = finish(engine, steps=6)
    clock.now += 4.5
    finish(engine, done, steps=1)
    assert done["last"].finished
    assert done["last"].outputs[0].finish_reason is FinishReason.DEADLINE
    assert bool(done["last"].outputs[0].token_ids) == (policy == "earliest_deadline")
    clock.now += 1
    finish(engine, done)
    for i in range(8):
        out, whole = done[str(i)].outputs[0], greedy(PROMPTS[i], 40)
        assert out.finish_reason is (FinishReason.DEADLINE if i % 2 else FinishReason.LENGTH)
        assert out.token_ids == whole[: len(out.token_ids)]
        assert i % 2 == 0 or 0 < len(out.token_ids) < 40
    assert engine.counters.requests_finished[FinishReason.DEADLINE] == 5
    assert_clean(engine)


def test_all_continuations_end_and_what_was_finished_before_stays():
    engine, clock = clocked()
    stop = greedy(PROMPTS[0], 12)[5]
    engine.add_request(Request("a", PROMPTS[0], params(n=2, max_tokens=400), deadline=1.0))
    engine.add_request(Request("b", PROMPTS[0], params(max_tokens=400, stop_token_ids=[stop]), deadline=1.0))
    done = finish(engine, steps=8)
    clock.now += 1.0
    finish(engine, done)
    assert [out.finish_reason for out in done["a"].outputs] == [FinishReason.DEADLINE] * 2
    assert done["b"].outputs[0].finish_reason is FinishReason.STOP
    assert_clean(engine)


def test_a_beam_search_that_is_cut_short_answers_with_its_beams():
    engine, clock = clocked()
    engine.add_request(Request("b", PROMPTS[0], params(n=2, beam_width=3, max_tokens=100), deadline=1.0))
    assert finish(engine, steps=6) == {}
    clock.now += 1.0
    outputs = finish(engine)["b"].outputs
    num = len(outputs[0].token_ids)
    assert 0 < num < 100
    assert [o.finish_reason for o in outputs] == [FinishReason.DEADLINE] * 2
    # The same search with so many tokens to generate has the same beams at its end.
    engine.add_request(Request("whole", PROMPTS[0], params(n=2, beam_width=3, max_tokens=num)))
    whole = finish(engine)["whole"].outputs
    assert [(o.token_ids, o.cumulative_logprob) for o in outputs] == [
        (o.token_ids, o.cumulative_logprob) for o in whole
    ]
    # Two answers each: the beams that were not among them are no sequences that ended.
    assert engine.counters.requests_finished == {FinishReason.DEADLINE: 2, FinishReason.LENGTH: 2}
    assert engine.counters.forks == 4
    assert_clean(engine)


def test_a_beam_search_that_has_not_begun_has_no_answer():
    engine, clock = clocked()
    engine.add_request(Request("b", PROMPTS[0], params(n=2, beam_width=2, max_tokens=200), deadline=1.0))
    clock.now += 1.0
    out = finish(engine)["b"]
    assert [(o.token_ids, o.finish_reason) for o in out.outputs] == [([], FinishReason.DEADLINE)] * 2
    assert_clean(engine)


def test_the_deadline_of_a_finished_request_is_forgotten():
    engine, clock = clocked()
    for deadline in (1.0, None):
        engine.add_request(Request("same", PROMPTS[0], params(max_tokens=4), deadline=deadline))
        (out,) = finish(engine).values()
        clock.now += 2
        assert out.outputs[0].finish_reason is FinishReason.LENGTH
    assert not engine._in_flight.deadlines


def test_it_counts_from_the_arrival():
    engine, _ = clocked()
    engine.add_request(Request("late", PROMPTS[0], params(), deadline=1.0), arrived=98.5)
    (out,) = finish(engine).values()
    assert (out.outputs[0].token_ids, out.outputs[0].finish_reason) == ([], FinishReason.DEADLINE)
    assert engine.counters.dispatches == 0


def test_a_decode_loop_does_not_run_far_past_a_deadline():
    engine, _ = clocked()
    engine.runner._step_seconds = {8: 0.1}
    free = engine._max_steps(1)
    assert free > 3
    engine.add_request(Request("0", PROMPTS[0], params(), deadline=0.35))
    assert engine._max_steps(1) == 3
    engine.abort("0")
    assert engine._max_steps(1) == free


def test_offline():
    llm = LLM(engine=make_engine(), progress=False)
    late, fine = (llm.generate(PROMPTS[0], params(), deadline=d, tenant="t")[0].outputs[0] for d in (1e-9, 1000.0))
    assert (late.token_ids, late.finish_reason) == ([], FinishReason.DEADLINE)
    assert fine.token_ids == greedy(PROMPTS[0], 12)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("deadline", 0),
        ("deadline", -1.0),
        ("deadline", float("nan")),
        ("deadline", 86_401),
        ("deadline", "1"),
        ("tenant", 5),
        ("tenant", "x" * 257),
        ("priority", 2**31),
        ("priority", 0.5),
    ],
)
def test_bad_values_are_named(field, value):
    with pytest.raises(InvalidRequestError) as error:
        Request("0", (1,), **{field: value})
    assert error.value.field == field
