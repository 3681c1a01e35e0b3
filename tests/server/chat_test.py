"""POST /v1/chat/completions against a scripted engine."""

import pytest

from tests.server.fakes import TOKENIZER, FakeAsyncEngine, byte_tokenizer
from tests.server.harness import error, events, joined, ok, post

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def chat(body, engine=None):
    return ok(post(engine or FakeAsyncEngine(), PATH, {"messages": HI, **body}))


def prompt_of(body):
    engine = FakeAsyncEngine()
    chat(body, engine)
    return TOKENIZER.decode(engine.requests[0].prompt_ids)


@pytest.mark.smoke
def test_an_answer():
    answer = chat({"model": "fake"})
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello"},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]


def test_the_template_makes_the_prompt():
    assert prompt_of({}) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_of({"add_generation_prompt": False}) == "<|im_start|>user\nhi<|im_end|>\n"
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert "\nab<|im_end|>" in prompt_of({"messages": parts})
    assert prompt_of({"messages": [{"role": "developer", "content": "x"}, *HI]}).startswith("<|im_start|>system\nx")


def test_the_last_message_can_be_continued():
    messages = [*HI, {"role": "assistant", "content": "Well,"}]
    body = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    assert prompt_of(body).endswith("<|im_start|>assistant\nWell,")
    error(post(FakeAsyncEngine(), PATH, {**body, "add_generation_prompt": True}), 400, "continue_final_message")


def test_max_tokens_is_the_rest_of_the_context_unless_given():
    engine = FakeAsyncEngine()
    chat({}, engine)
    chat({"max_tokens": 3}, engine)
    chat({"max_completion_tokens": 4}, engine)
    assert [r.sampling.max_tokens for r in engine.requests] == [None, 3, 4]
    error(
        post(engine, PATH, {"messages": HI, "max_tokens": 3, "max_completion_tokens": 4}), 400, "max_completion_tokens"
    )
    error(post(engine, PATH, {"messages": HI, "max_completion_tokens": 0}), 400, "max_completion_tokens")


@pytest.mark.parametrize("include", [None, False, True])
def test_a_stream(include):
    options = {} if include is None else {"stream_options": {"include_usage": include}}
    chunks = events(post(FakeAsyncEngine(), PATH, {"messages": HI, "n": 3, "stream": True, **options}))
    usages = [c for c in chunks if c.get("usage")]
    if include:
        assert chunks[-1]["choices"] == []
        assert usages == [chunks.pop()]
        assert usages[0]["usage"]["completion_tokens"] == 18
        assert usages[0]["usage"]["prompt_tokens"] < 60
    else:
        assert not any("usage" in c for c in chunks)
    for index in range(3):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": "h"}
        assert not any("role" in c["delta"] for c in mine[1:])
        assert "".join(c["delta"].get("content", "") for c in mine) == "hello"
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["stop"]
    assert len({c["id"] for c in chunks}) == 1
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}


def test_logprobs_with_bytes_of_split_characters():
    answer = chat({"logprobs": True, "top_logprobs": 2}, FakeAsyncEngine(script=lambda r, i: "é"))
    content = answer["choices"][0]["logprobs"]["content"]
    assert [c["bytes"] for c in content] == [[0xC3], [0xA9], list(b"<|im_end|>")]
    assert content[0]["token"] == "\ufffd"
    assert len(content[0]["top_logprobs"]) == 2
    engine = FakeAsyncEngine()
    chat({"logprobs": True}, engine)
    assert engine.requests[0].sampling.logprobs == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b"}}]}]},
            "messages.0.content.0",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages.0.content.0.text"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
    ids=str,
)
def test_what_is_refused_is_named(body, param):
    engine = FakeAsyncEngine()
    error(post(engine, PATH, {"messages": HI, **body}), 400, param)
    assert not engine.requests


def test_what_is_harmless_is_accepted():
    chat(
        {
            "tools": [],
            "tool_choice": "none",
            "response_format": {"type": "text"},
            "user": "u",
            "store": False,
            "metadata": {},
        }
    )


def test_the_template_may_refuse():
    messages = [*HI, {"role": "system", "content": "late"}]
    found = error(post(FakeAsyncEngine(), PATH, {"messages": messages}), 400, "messages")
    assert "system comes first" in found["message"]


def test_a_model_without_template():
    engine = FakeAsyncEngine(tokenizer=byte_tokenizer(None))
    assert "chat template" in error(post(engine, PATH, {"messages": HI}), 400, "messages")["message"]


def test_a_conversation_that_is_too_long_names_messages():
    engine = FakeAsyncEngine(max_model_len=16)
    error(post(engine, PATH, {"messages": HI}), 400, "messages")
    error(post(engine, PATH, {"messages": HI, "stream": True}), 400, "messages")


def test_extensions():
    answer = chat({"return_token_ids": True, "prompt_logprobs": 0})
    assert answer["choices"][0]["token_ids"] == [*TOKENIZER.encode("hello"), 257]
    assert TOKENIZER.decode(answer["prompt_token_ids"]).startswith("<|im_start|>user")
    assert answer["prompt_logprobs"][0] is None
    first, *others = events(post(FakeAsyncEngine(), PATH, {"messages": HI, "stream": True, "return_token_ids": True}))
    assert first["prompt_token_ids"] == answer["prompt_token_ids"]
    assert not any("prompt_token_ids" in c for c in others)
    assert joined(c["choices"][0]["token_ids"] for c in [first, *others]) == answer["choices"][0]["token_ids"]


def test_template_code_in_a_message_is_text():
    text = "{{ ''.__class__.__mro__ }}{% for i in range(10**9) %}x{% endfor %}"
    assert text in prompt_of({"messages": [{"role": "user", "content": text}]})
