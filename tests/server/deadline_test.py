"""`deadline_ms`, and whose request it is: how they reach the engine, and what a client sees of a deadline that passed."""

import pytest

from tests.server.fakes import FakeAsyncEngine, fixed
from tests.server.harness import error, events, ok, post

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BASE = {COMPLETIONS: {"prompt": "a"}, CHAT: {"messages": [{"role": "user", "content": "a"}]}}

each_path = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


@each_path
def test_they_reach_the_engine(path):
    engine = FakeAsyncEngine()
    ok(post(engine, path, {**BASE[path], "deadline_ms": 2500, "priority": -3}))
    ok(post(engine, path, BASE[path]))
    assert [(r.deadline, r.priority, r.tenant) for r in engine.requests] == [(2.5, -3, ""), (None, 0, "")]


def test_the_tenant_is_the_api_key():
    engine = FakeAsyncEngine()
    for key in ("one", "two", "one"):
        headers = {"Authorization": f"Bearer {key}"}
        ok(post(engine, COMPLETIONS, {"prompt": "a", "tenant": "two"}, keys=("one", "two"), headers=headers))
    first, second, _ = (r.tenant for r in engine.requests)
    assert first
    assert second
    assert first != second
    assert "one" not in first


@each_path
@pytest.mark.parametrize("stream", [False, True])
def test_without_a_first_token_it_is_an_error_that_is_not_tried_again(path, stream):
    engine = FakeAsyncEngine(delay=0.05)
    response = post(engine, path, {**BASE[path], "deadline_ms": 10, "stream": stream})
    assert error(response, 504, "deadline_ms")["code"] == "deadline_exceeded"
    assert response.headers["x-should-retry"] == "false"
    assert not engine.running


@each_path
def test_with_some_tokens_they_are_the_answer(path):
    body = {**BASE[path], "deadline_ms": 150, "max_tokens": 100}
    whole = ok(post(FakeAsyncEngine(script=fixed("x" * 90), delay=0.02), path, body))["choices"][0]
    assert whole["finish_reason"] == "deadline"
    text = whole["text"] if path == COMPLETIONS else whole["message"]["content"]
    assert 0 < len(text) < 90
    *_, last = events(post(FakeAsyncEngine(script=fixed("x" * 90), delay=0.02), path, {**body, "stream": True}))
    assert last["choices"][0]["finish_reason"] == "deadline"


def test_of_several_prompts_each_says_how_it_ended():
    engine = FakeAsyncEngine(delay=0.05)
    choices = ok(post(engine, COMPLETIONS, {"prompt": ["a", "b"], "deadline_ms": 10}))["choices"]
    assert [(c["text"], c["finish_reason"]) for c in choices] == [("", "deadline")] * 2
