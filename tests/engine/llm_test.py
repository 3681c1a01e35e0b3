"""`LLM` around a tiny engine: arguments, order, interrupts, threads."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest

from pagedjax import LLM
from pagedjax.errors import InvalidRequestError
from tests.engine.tiny import assert_clean, greedy, make_engine, params, random_prompts

PROMPTS = random_prompts(12, 1, 60, seed=11)


@pytest.fixture(scope="module")
def llm():
    return LLM(engine=make_engine(), progress=False)


def ids(outputs):
    return [out.outputs[0].token_ids for out in outputs]


def test_one_or_many_prompts_in_order_whatever_holds_them(llm):
    expected = [greedy(p, 12) for p in PROMPTS]
    assert ids(llm.generate([list(p) for p in PROMPTS], params())) == expected
    assert ids(llm.generate((p for p in PROMPTS), params())) == expected
    assert ids(llm.generate([np.array(p) for p in PROMPTS], params())) == expected
    assert ids(llm.generate(np.array(PROMPTS[1]), params())) == [expected[1]]
    assert ids(llm.generate(PROMPTS[:2], [params(), params(max_tokens=3)])) == [expected[0], expected[1][:3]]
    assert llm.generate([], params()) == []


@pytest.mark.parametrize("prompts", [None, 5, b"a", [b"a"], [None], [[1], 2.5], [[]], [["a"]], "text", {"prompt": "a"}])
def test_bad_prompts_are_named_before_anything_runs(llm, prompts):
    dispatches = llm.engine.counters.dispatches
    with pytest.raises(InvalidRequestError):
        llm.generate(prompts, params())
    with pytest.raises(InvalidRequestError):
        llm.generate([PROMPTS[0], [10**6]], params())
    assert llm.engine.counters.dispatches == dispatches
    assert not llm.engine.has_unfinished()


def test_beam_search_answers_best_first(llm):
    many = llm.beam_search([list(p) for p in PROMPTS[:2]], 4, max_tokens=5, ignore_eos=True, detokenize=False)
    for out in many:
        scores = [o.cumulative_logprob for o in out.outputs]
        assert len(scores) == 4
        assert scores == sorted(scores, reverse=True)
    best = llm.beam_search(list(PROMPTS[0]), 4, n=1, max_tokens=5, ignore_eos=True, detokenize=False)
    assert ids(best) == [many[0].outputs[0].token_ids]
    with pytest.raises(InvalidRequestError, match="beam_width"):
        llm.beam_search(list(PROMPTS[0]), 11)


def test_bad_parameters_and_messages_are_named(llm):
    for bad in ({"max_tokens": 3}, [params()], [params(), None], [{}, {}]):
        with pytest.raises(InvalidRequestError, match="sampling_params"):
            llm.generate(PROMPTS[:2], bad)
    for bad in ("hi", {"role": "user"}, None):
        with pytest.raises(InvalidRequestError, match="messages"):
            llm.chat(bad, params())
    for field, value in (
        ("stop", 5),
        ("stop_token_ids", 5),
        ("stop", b"x"),
        ("stop", [b"x"]),
        ("temperature", "1"),
        ("temperature", np.bool_(1)),
    ):
        with pytest.raises(InvalidRequestError, match=field):
            params(**{field: value})
    assert params(temperature=np.float32(0.5)).temperature == 0.5


def test_interrupts_end_the_call_and_leave_the_engine_sound(llm):
    """Whenever Ctrl-C comes, the call raises KeyboardInterrupt and the next one works."""
    rng = np.random.default_rng(0)
    interrupted = 0
    for _ in range(12):
        timer = threading.Timer(rng.uniform(0.001, 0.15), os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            llm.generate(PROMPTS * 4, params(max_tokens=40))
            timer.join()  # it came too late: outside, it raises as usual
        except KeyboardInterrupt:
            interrupted += 1
        assert not llm.engine.has_unfinished()
    assert interrupted > 0
    assert_clean(llm.engine)
    assert ids(llm.generate(PROMPTS[:2], params())) == [greedy(p, 12) for p in PROMPTS[:2]]


def test_threads_take_turns(llm):
    results: dict[int, list] = {}

    def work(i: int) -> None:
        results[i] = ids(llm.generate(PROMPTS[3 * i : 3 * i + 3], params()))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [t for i in range(4) for t in results[i]] == [greedy(p, 12) for p in PROMPTS]
