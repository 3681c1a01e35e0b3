"""POST /v1/completions against a scripted engine."""

import pytest

from tests.server.fakes import TOKENIZER, FakeAsyncEngine, byte_tokenizer, config
from tests.server.harness import error, events, joined, ok, post

PATH = "/v1/completions"


def complete(body, engine=None):
    return ok(post(engine or FakeAsyncEngine(), PATH, body))


@pytest.mark.smoke
def test_a_completion():
    answer = complete({"model": "fake", "prompt": "abc"})
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [
        {"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_max_tokens_is_16_unless_given():
    engine = FakeAsyncEngine(script=lambda r, i: "x" * 100)
    answer = complete({"prompt": "a"}, engine)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab"], ["ab"]),
        (["a", "b" * 32, "c" * 16], ["a", "b" * 32, "c" * 16]),
        (TOKENIZER.encode("ab"), ["ab"]),
        ([TOKENIZER.encode("ab"), TOKENIZER.encode("c")], ["ab", "c"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_one_choice_a_prompt_in_its_place(prompt, texts, stream):
    engine = FakeAsyncEngine(script=lambda r, i: f"<{TOKENIZER.decode(r.prompt_ids)}>")
    response = post(engine, PATH, {"prompt": prompt, "max_tokens": 99, "stream": stream})
    found = {}
    for answer in events(response) if stream else [ok(response)]:
        for choice in answer["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    assert found == {i: f"<{text}>" for i, text in enumerate(texts)}


def test_several_continuations_of_several_prompts():
    engine = FakeAsyncEngine(script=lambda r, i: f"{TOKENIZER.decode(r.prompt_ids)}{i}")
    answer = complete({"prompt": ["a", "bb"], "n": 3}, engine)
    assert [c["text"] for c in answer["choices"]] == ["a0", "a1", "a2", "bb0", "bb1", "bb2"]
    assert [c["index"] for c in answer["choices"]] == list(range(6))
    assert answer["usage"]["prompt_tokens"] == 3  # each prompt once
    assert answer["usage"]["completion_tokens"] == 3 * 3 + 3 * 4


@pytest.mark.parametrize("include", [None, False, True])
def test_usage_in_a_stream_only_on_request_and_once_at_the_end(include):
    options = {} if include is None else {"stream_options": {"include_usage": include}}
    chunks = events(post(FakeAsyncEngine(), PATH, {"prompt": "abc", "n": 2, "stream": True, **options}))
    if not include:
        assert not any("usage" in c for c in chunks)
        assert all(c["choices"] for c in chunks)
        return
    *others, last = chunks
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == 3
    assert last["usage"]["completion_tokens"] == 12
    assert all(c["usage"] is None and c["choices"] for c in others)


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_streamed_and_whole_answers_are_the_same(chunk):
    text = "Příliš 🦊 漢字\n"
    body = {"prompt": "a", "max_tokens": 99, "logprobs": 1, "echo": True, "return_token_ids": True}
    whole = complete(body, FakeAsyncEngine(script=lambda r, i: text, chunk=chunk))["choices"][0]
    chunks = events(post(FakeAsyncEngine(script=lambda r, i: text, chunk=chunk), PATH, {**body, "stream": True}))
    parts = [c["choices"][0] for c in chunks]
    assert whole["text"] == "a" + text == "".join(p["text"] for p in parts)
    assert "\ufffd" not in whole["text"]
    assert not any("\ufffd" in p["text"] for p in parts)
    assert whole["token_ids"] == joined(p["token_ids"] for p in parts)
    for key in ("tokens", "token_logprobs", "top_logprobs"):
        assert whole["logprobs"][key] == joined(p["logprobs"][key] for p in parts)
    assert [p["finish_reason"] for p in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert parts[0]["prompt_token_ids"] == whole["prompt_token_ids"] == TOKENIZER.encode("a")


def test_chunks_without_news_are_left_out():
    engine = FakeAsyncEngine(script=lambda r, i: "🦊")
    chunks = events(post(engine, PATH, {"prompt": "a", "stream": True}))
    assert [c["choices"][0]["text"] for c in chunks] == ["", "🦊", ""]  # the first chunk, the character, the end


def test_logprobs_have_an_entry_a_token():
    choice = complete({"prompt": "ab", "logprobs": 2})["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [*"hello", "<|im_end|>"]
    assert logprobs["token_logprobs"] == [-0.5] * 6
    assert logprobs["top_logprobs"][0] == {"h": -0.5, "i": -2.0}
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4, 5]


def test_echo_scores_the_prompt_too():
    choice = complete({"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 1})["choices"][0]
    assert choice["text"] == "abh"
    assert choice["logprobs"]["tokens"] == ["a", "b", "h"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_max_tokens_0_is_the_prompt_alone(stream):
    body = {"prompt": [TOKENIZER.encode("ab"), TOKENIZER.encode("c")], "echo": True, "logprobs": 1, "max_tokens": 0}
    engine = FakeAsyncEngine()
    if stream:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = events(post(engine, PATH, {**body, **options}))
        choices, usage = sorted((c["choices"][0] for c in chunks), key=lambda c: c["index"]), last["usage"]
    else:
        answer = complete(body, engine)
        choices, usage = answer["choices"], answer["usage"]
    assert [c["text"] for c in choices] == ["ab", "c"]
    assert choices[0]["logprobs"]["token_logprobs"] == [None, -0.5]
    assert [c["finish_reason"] for c in choices] == ["length", "length"]
    assert usage["completion_tokens"] == 0
    assert usage["prompt_tokens"] == 3


def test_max_tokens_0_without_echo_is_an_error():
    error(post(FakeAsyncEngine(), PATH, {"prompt": "a", "max_tokens": 0}), 400, "max_tokens")


@pytest.mark.parametrize("logprob", [float("-inf"), float("nan"), -1e30])
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_that_are_not_finite_never_reach_the_json(logprob, stream):
    engine = FakeAsyncEngine()
    engine.logprob = logprob
    body = {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 2, "prompt_logprobs": 1, "stream": stream}
    response = post(engine, PATH, body)
    answer = events(response)[0] if stream else ok(response)
    found = answer["choices"][0]["logprobs"]["token_logprobs"][1]
    assert found is None if logprob != logprob else found == -9999.0


def test_the_extension_prompt_logprobs():
    choice = complete({"prompt": "ab", "prompt_logprobs": 1})["choices"][0]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert second[str(TOKENIZER.encode("b")[0])] == {"logprob": -0.5, "rank": 1, "decoded_token": "b"}


def test_tokens_as_ids_in_logprobs():
    choice = complete({"prompt": "ab", "logprobs": 1, "return_tokens_as_token_ids": True})["choices"][0]
    assert choice["logprobs"]["tokens"][0] == f"token_id:{TOKENIZER.encode('h')[0]}"


def test_cached_tokens_are_reported():
    engine = FakeAsyncEngine()
    engine.cached_tokens = 2
    assert complete({"prompt": "abc"}, engine)["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_truncation_keeps_the_end():
    engine = FakeAsyncEngine()
    answer = complete({"prompt": "abcdef", "truncate_prompt_tokens": 2, "echo": True}, engine)
    assert engine.requests[0].prompt_ids == tuple(TOKENIZER.encode("ef"))
    assert answer["choices"][0]["text"] == "efhello"


def test_every_sampling_parameter_reaches_the_engine():
    given = {
        "n": 2,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 2**63 - 1,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.5,
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "prompt_logprobs": 3,
        "logprobs": 4,
    }
    engine = FakeAsyncEngine()
    complete(
        {"prompt": "a", "logit_bias": {"5": -3}, "stop": "xy", "stop_token_ids": [3], "cache_salt": "s", **given},
        engine,
    )
    (request,) = engine.requests
    for name, value in given.items():
        assert getattr(request.sampling, name) == value, name
    assert request.sampling.logit_bias == {5: -3.0}
    assert request.sampling.stop == ("xy",)
    assert request.sampling.stop_token_ids == (3,)
    assert request.cache_salt == ":s"


def test_null_means_the_default():
    engine = FakeAsyncEngine()
    names = (
        "n temperature top_p seed stop max_tokens logprobs echo logit_bias stream stream_options user suffix best_of"
    )
    complete({"prompt": "a", **dict.fromkeys(names.split())}, engine)
    assert engine.requests[0].sampling.n == 1
    assert engine.requests[0].sampling.max_tokens == 16


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [""],
        ["a", ""],
        [[]],
        [[1], []],
        {},
        3,
        1.5,
        True,
        None,
        [1, "a"],
        ["a", 1],
        [[1], "a"],
        [1.5],
        [[1.5]],
        [[True]],
        [None],
    ],
    ids=str,
)
def test_prompts_that_are_none(prompt):
    engine = FakeAsyncEngine()
    error(post(engine, PATH, {"prompt": prompt}), 400, "prompt")
    assert not engine.requests


@pytest.mark.parametrize("token", [-1, 258, 259, 2**31, 2**63, 2**80])
def test_ids_outside_the_vocabulary_are_named(token):
    engine = FakeAsyncEngine()
    found = error(post(engine, PATH, {"prompt": [5, token]}), 400, "prompt")
    assert str(token) in found["message"]
    assert not engine.requests


def test_text_that_is_not_unicode():
    error(post(FakeAsyncEngine(), PATH, b'{"prompt": "\\ud800"}'), 400, "prompt")


def test_the_number_of_prompts_and_sequences_is_bounded():
    engine = FakeAsyncEngine(config(max_prompts=3, max_sequences=4))
    assert "at most 3" in error(post(engine, PATH, {"prompt": ["a"] * 4}), 400, "prompt")["message"]
    assert "4 at most, got 6" in error(post(engine, PATH, {"prompt": ["a"] * 3, "n": 2}), 400, "n")["message"]
    assert not engine.requests


def test_a_model_without_tokenizer_takes_ids_only():
    engine = FakeAsyncEngine(tokenizer=None)
    error(post(engine, PATH, {"prompt": "a"}), 400, "prompt")
    assert complete({"prompt": [1, 2]}, engine)["choices"][0]["text"] == "hello"


def test_special_tokens_in_a_text_prompt_are_what_the_tokenizer_makes_of_them():
    engine = FakeAsyncEngine(tokenizer=byte_tokenizer(None))
    complete({"prompt": "<|im_end|>"}, engine)
    assert engine.requests[0].prompt_ids == (257,)
