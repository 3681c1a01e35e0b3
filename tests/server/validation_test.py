"""Every field under hostile values: a 400 that names it, or an answer; never a 500, never an engine that saw it."""

import json

import pytest

from pagedjax import types
from tests.server.fakes import FakeAsyncEngine
from tests.server.harness import error, get, ok, post, strict_json, with_client

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BASE = {COMPLETIONS: {"prompt": "a"}, CHAT: {"messages": [{"role": "user", "content": "a"}]}}

INTEGERS = {  # field: (lowest, highest)
    "n": (1, types.MAX_N),
    "top_k": (-1, 2**31 - 1),
    "seed": (-(2**63), 2**64 - 1),
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 16),
    "prompt_logprobs": (0, types.MAX_LOGPROBS),
    "truncate_prompt_tokens": (1, None),
    "priority": (-(2**31), 2**31 - 1),
}
NUMBERS = {  # field: (lowest, highest, a value just below, a value just above)
    "temperature": (0, 2, -0.01, 2.01),
    "top_p": (0.01, 1, 0, 1.01),
    "min_p": (0, 1, -0.01, 1.01),
    "presence_penalty": (-2, 2, -2.01, 2.01),
    "frequency_penalty": (-2, 2, -2.01, 2.01),
    "repetition_penalty": (0.01, 10, 0, 10.01),
    "deadline_ms": (1000, 86_400_000, 0, 86_400_001),
}
NOT_NUMBERS = ["1", "x", True, False, [], [1], {}, float("nan"), float("inf"), -float("inf"), 10**400]
BOOLEANS = ["stream", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "return_token_ids"]


def check_many(path, cases):
    """Posts all cases through one application; each is (body, param at fault or None)."""
    engine = FakeAsyncEngine()

    async def work(client):
        for fields, param in cases:
            content = json.dumps({**BASE[path], **fields}).encode()
            response = await client.post(path, content=content, headers={"Content-Type": "application/json"})
            seen = len(engine.requests)
            if param is None:
                assert response.status_code == 200, (fields, response.text)
            else:
                found = error(response, 400)
                assert str(found["param"]).split(".")[0] == param, (fields, found)
                assert not seen, fields
            engine.requests.clear()

    with_client(engine, work)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_numbers_at_and_beyond_their_limits(path):
    cases = []
    limits = dict(INTEGERS)
    limits["logprobs" if path == COMPLETIONS else "top_logprobs"] = (0, types.MAX_LOGPROBS)
    if path == CHAT:
        limits["max_completion_tokens"] = (1, 2**31 - 1)
    for name, (low, high) in limits.items():
        extra = {"logprobs": True} if name == "top_logprobs" else {}
        extra |= {"max_tokens": 16} if name == "min_tokens" else {}
        cases += [({**extra, name: low}, None), ({**extra, name: low - 1}, name), ({**extra, name: None}, None)]
        if high is not None:
            cases += [({**extra, name: high}, None), ({**extra, name: high + 1}, name)]
        if name not in ("seed", "truncate_prompt_tokens"):
            cases.append(({**extra, name: 2**63}, name))
        cases += [
            ({**extra, name: value}, name) for value in [*NOT_NUMBERS, 1.5] if value != 10**400 or high is not None
        ]
    for name, (low, high, below, above) in NUMBERS.items():
        cases += [({name: low}, None), ({name: high}, None), ({name: None}, None)]
        cases += [({name: value}, name) for value in (below, above, 2**63, -(2**63), *NOT_NUMBERS)]
    for name in BOOLEANS:
        cases += [({name: value}, name) for value in ("true", 1, 0, [], 1.0)]
    check_many(path, cases)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_lists_and_maps(path):
    check_many(
        path,
        [
            ({"stop": []}, None),
            ({"stop": None}, None),
            ({"stop": ["a"] * types.MAX_STOP_STRINGS}, None),
            ({"stop": ["a"] * (types.MAX_STOP_STRINGS + 1)}, "stop"),
            ({"stop": [""]}, "stop"),
            ({"stop": ["a", ""]}, "stop"),
            ({"stop": 5}, "stop"),
            ({"stop": [5]}, "stop"),
            ({"stop": {"a": 1}}, "stop"),
            ({"stop_token_ids": [1] * types.MAX_STOP_TOKEN_IDS}, None),
            ({"stop_token_ids": [1] * (types.MAX_STOP_TOKEN_IDS + 1)}, "stop_token_ids"),
            ({"stop_token_ids": [-1]}, "stop_token_ids"),
            ({"stop_token_ids": [2**31]}, "stop_token_ids"),
            ({"stop_token_ids": ["1"]}, "stop_token_ids"),
            ({"stop_token_ids": [True]}, "stop_token_ids"),
            ({"stop_token_ids": "12"}, "stop_token_ids"),
            ({"stop_token_ids": 5}, "stop_token_ids"),
            ({"logit_bias": {}}, None),
            ({"logit_bias": {"5": 100, "6": -100.5}}, None),
            ({"logit_bias": {"x": 1}}, "logit_bias"),
            ({"logit_bias": {"-1": 1}}, "logit_bias"),
            ({"logit_bias": {"1": "x"}}, "logit_bias"),
            ({"logit_bias": {"1": True}}, "logit_bias"),
            ({"logit_bias": {"1": float("nan")}}, "logit_bias"),
            ({"logit_bias": {str(2**63): 1}}, "logit_bias"),
            ({"logit_bias": {str(i): 1 for i in range(types.MAX_LOGIT_BIAS + 1)}}, "logit_bias"),
            ({"logit_bias": [1]}, "logit_bias"),
            ({"cache_salt": 5}, "cache_salt"),
            ({"cache_salt": "x" * 257}, "cache_salt"),
            ({"model": 5}, "model"),
            ({"stream": True, "stream_options": 5}, "stream_options"),
            ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
            ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
            ({"unheard_of": 1}, None),
        ],
    )


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_beam_search_fields(path):
    search = {"use_beam_search": True}
    check_many(
        path,
        [
            ({**search, "n": 4}, None),
            ({**search, "n": 2, "best_of": 6, "length_penalty": -0.5, "early_stopping": "never"}, None),
            ({**search, "n": 2, "beam_width": 3, "early_stopping": True}, None),
            ({**search, "temperature": 0, "seed": 3}, None),
            ({**search, "temperature": 1}, None),
            ({**search, "temperature": 0.7}, "temperature"),
            ({**search, "top_p": 0.9}, "top_p"),
            ({**search, "top_k": 5}, "top_k"),
            ({"best_of": 1, "length_penalty": 1.0, "early_stopping": False, "use_beam_search": False}, None),
            ({"best_of": 2}, "best_of"),
            ({"beam_width": 2}, "beam_width"),
            ({"length_penalty": 0.5}, "length_penalty"),
            ({"early_stopping": True}, "early_stopping"),
            ({**search, "n": 11}, "n"),
            ({**search, "n": 3, "best_of": 2}, "n"),
            ({**search, "best_of": 0}, "best_of"),
            ({**search, "best_of": 2, "beam_width": 3}, "beam_width"),
            ({**search, "best_of": 2.5}, "best_of"),
            ({**search, "n": 2, "early_stopping": "maybe"}, "early_stopping"),
            ({**search, "n": 2, "length_penalty": 11}, "length_penalty"),
            ({**search, "n": 2, "stream": True}, "stream"),
            ({**search, "n": 2, "stop": ["x"]}, "stop"),
            ({**search, "n": 2, "min_tokens": 2}, "min_tokens"),
            ({**search, "n": 2, "presence_penalty": 1}, "presence_penalty"),
        ],
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "x"),
        ("guided_json", {}),
        ("guided_regex", "a*"),
        ("structured_outputs", {"json": {}}),
        ("bad_words", ["x"]),
        ("allowed_token_ids", [1]),
        ("prompt_embeds", "x"),
    ],
)
def test_fields_of_other_servers_that_change_the_answer_are_refused(field, value):
    engine = FakeAsyncEngine()
    response = post(engine, COMPLETIONS, {"prompt": "a", field: value})
    if not value:
        return
    assert "not supported yet" in error(response, 400, field)["message"]
    assert not engine.requests


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"5",
        b"\xff\xfe",
        b'{"prompt": "a",}',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a"} trailing',
    ],
    ids=lambda b: repr(b[:16]),
)
@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
def test_bodies_that_are_no_object(path, body):
    found = error(post(FakeAsyncEngine(), path, body), 400)
    assert "object at 0x" not in found["message"]
    assert "/" not in found["message"].replace("application/json", "")


def test_a_body_without_its_content_type_says_so():
    response = post(FakeAsyncEngine(), COMPLETIONS, {"prompt": "a"}, headers={"Content-Type": "text/plain"})
    assert "Content-Type: application/json" in error(response, 400)["message"]


def test_long_lists_of_wrong_items_are_refused_at_the_first():
    bad = [1.5] * 200_000
    for path, fields in (
        (COMPLETIONS, {"prompt": bad}),
        (COMPLETIONS, {"stop_token_ids": bad}),
        (CHAT, {"messages": bad}),
    ):
        response = post(FakeAsyncEngine(), path, {**BASE[path], **fields})
        error(response, 400)
        assert len(response.content) < 1000


def test_another_model_is_not_found():
    for path in BASE:
        found = error(post(FakeAsyncEngine(), path, {**BASE[path], "model": "gpt-4"}), 404, "model")
        assert found["code"] == "model_not_found"
        assert "fake" in found["message"]


def test_unknown_paths_and_methods():
    error(get(FakeAsyncEngine(), "/v1/nothing"), 404)
    error(get(FakeAsyncEngine(), COMPLETIONS), 405)
    error(get(FakeAsyncEngine(), "/v1/models/../../etc/passwd"), 404)


def test_tokenize_and_detokenize():
    engine = FakeAsyncEngine()
    found = ok(post(engine, "/tokenize", {"prompt": "aé", "return_token_strs": True}))
    assert found["count"] == 3
    assert found["max_model_len"] == 512
    assert len(found["token_strs"]) == 3
    assert ok(post(engine, "/detokenize", {"tokens": found["tokens"]})) == {"prompt": "aé"}
    chat = ok(post(engine, "/tokenize", {"messages": [{"role": "user", "content": "hi"}]}))
    assert ok(post(engine, "/detokenize", {"tokens": chat["tokens"]}))["prompt"].endswith("<|im_start|>assistant\n")
    error(post(engine, "/tokenize", {}), 400, "prompt")
    error(post(engine, "/tokenize", {"prompt": "a", "messages": [{"role": "user"}]}), 400, "prompt")
    for bad in ([258], [-1], [True], ["1"], [1.0], "1", None, 5):
        error(post(engine, "/detokenize", {"tokens": bad}), 400, "tokens")


def test_models_and_version():
    (card,) = ok(get(FakeAsyncEngine(), "/v1/models"))["data"]
    assert card["id"] == "fake"
    assert card["max_model_len"] == 512
    assert ok(get(FakeAsyncEngine(), "/v1/models/fake")) == {**card, "created": pytest.approx(card["created"], abs=100)}
    error(get(FakeAsyncEngine(), "/v1/models/a/b"), 404, "model")
    assert set(ok(get(FakeAsyncEngine(), "/version"))) == {"version"}


def test_the_schema_describes_the_bodies():
    schema = strict_json(get(FakeAsyncEngine(), "/openapi.json").text)
    fields = schema["components"]["schemas"]["CompletionRequest"]["properties"]
    assert {"prompt", "temperature", "stop", "cache_salt"} <= set(fields)
