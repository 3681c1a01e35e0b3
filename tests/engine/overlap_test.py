"""The next decode loop starts before the last one is read: the same answers, and nothing is lost between the two."""

from __future__ import annotations

import pytest

from pagedjax import Request
from tests.engine.tiny import assert_clean, greedy, make_engine, params, random_prompts, run, tokens

PROMPTS = random_prompts(5, 3, 20, seed=51)


def step_all(engine, on_turn=lambda turn: None) -> tuple[dict[str, list[int]], int]:
    """(tokens by request, turns that ended with a loop in flight)."""
    ids: dict[str, list[int]] = {}
    turn = overlapped = 0
    while engine.has_unfinished():
        for out in engine.step():
            ids.setdefault(out.request_id, []).extend(out.outputs[0].token_ids if out.outputs else [])
        overlapped += engine._flight is not None
        on_turn(turn)
        turn += 1
    return ids, overlapped


@pytest.mark.parametrize("overlap", [True, False])
def test_answers_are_the_oracles(overlap):
    engine = make_engine(runner__overlap=overlap, runner__max_steps=3)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(Request(str(i), prompt, params(max_tokens=4 + 5 * i)))
    ids, overlapped = step_all(engine)
    assert ids == {str(i): greedy(p, 4 + 5 * i) for i, p in enumerate(PROMPTS)}
    assert (overlapped > 3) == overlap
    assert_clean(engine)


def test_requests_come_and_go_while_a_loop_is_in_flight():
    engine = make_engine(runner__max_steps=3)
    for i, prompt in enumerate(PROMPTS[:3]):
        engine.add_request(Request(str(i), prompt, params(max_tokens=40)))

    def on_turn(turn: int) -> None:
        if turn == 6:
            assert engine._flight is not None
            engine.abort("1")
            engine.add_request(Request("late", PROMPTS[3], params(max_tokens=12)))
        if turn == 14:
            engine.abort("2")

    ids, _ = step_all(engine, on_turn)
    assert (ids["0"], ids["late"]) == (greedy(PROMPTS[0], 40), greedy(PROMPTS[3], 12))
    for name in ("1", "2"):
        assert ids[name] == greedy(PROMPTS[int(name)], 40)[: len(ids[name])]
        assert len(ids[name]) < 40
    assert_clean(engine)
    # What the last loop in flight left behind does not disturb who comes next.
    assert tokens(run(engine, PROMPTS, params())) == [greedy(p, 12) for p in PROMPTS]


def test_faults_met_by_two_loops_preempt_once():
    engine = make_engine(cache__num_pages=11, runner__max_steps=2, scheduler__growth_share=0.0)
    prompts = random_prompts(2, 9, 10, seed=7)
    assert tokens(run(engine, prompts, params(max_tokens=47))) == [greedy(p, 47) for p in prompts]
    assert 1 <= engine.counters.preemptions <= 3
    assert_clean(engine)
