"""Prompts and conversations as token ids: one BOS, no template, templates that refuse (A24, A25)."""

from __future__ import annotations

import pytest

from pagedjax.errors import InvalidRequestError
from pagedjax.weights import LoadedModel
from tests.weights.files import BOS_TEMPLATE, CHAT_TEMPLATE, block_spec, hf_tokenizer

CHAT = [{"role": "user", "content": "hello"}]
BOS, START = 0, 1


def loaded(**changes) -> LoadedModel:
    return LoadedModel(None, block_spec(), hf_tokenizer(**changes), "tiny", (2,))


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, BOS_TEMPLATE])
def test_exactly_one_bos(template):
    model = loaded(add_bos=True, chat_template=template)
    assert model.adds_bos
    ids = model.encode_chat(CHAT)
    assert (ids.count(BOS), ids[0], ids[1]) == (1, BOS, START)
    assert model.encode("hello").count(BOS) == 1
    assert model.encode("<|endoftext|>hello") == model.encode("hello")  # the client wrote it already
    assert BOS not in model.encode("hello", add_special_tokens=False)


def test_a_model_without_bos_gets_none():
    model = loaded()
    assert not model.adds_bos
    assert model.encode_chat(CHAT)[0] == START
    assert BOS not in model.encode("hello")
    assert loaded(chat_template=BOS_TEMPLATE).encode_chat(CHAT)[0] == BOS  # what the template writes stays


def test_the_template_gets_its_arguments():
    model = loaded()
    assert model.render_chat(CHAT) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert model.render_chat(CHAT, add_generation_prompt=False) == "<|im_start|>user\nhello<|im_end|>\n"
    template = "{{ messages[0]['content'] }} {{ mood }} {{ tools[0]['function']['name'] }}"
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    assert model.render_chat(CHAT, chat_template=template, tools=[tool], mood="fine") == "hello fine add"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "model 'tiny' has no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "the chat template refuses them: roles must alternate"),
        ("{{ messages[7]['content'] }}", "the chat template refuses them"),
        ("{% for %}", "the chat template refuses them"),
        ("{{ ''.__class__.__mro__ }}", "the chat template refuses them"),
    ],
)
def test_conversations_that_cannot_be_rendered(template, message):
    with pytest.raises(InvalidRequestError, match=message) as raised:
        loaded(chat_template=template).encode_chat(CHAT)
    assert raised.value.field == "messages"


def test_without_a_tokenizer_and_with_broken_text():
    bare = LoadedModel(None, block_spec(), None, "tiny")
    assert bare.chat_template is None
    for call, field in ((lambda: bare.encode("x"), "prompt"), (lambda: bare.encode_chat(CHAT), "messages")):
        with pytest.raises(InvalidRequestError, match="has no tokenizer") as raised:
            call()
        assert raised.value.field == field
    with pytest.raises(InvalidRequestError, match="cannot be encoded"):
        loaded().encode("half a pair: \ud83d")


@pytest.mark.parametrize("text", ["one", " one", "  two", "a b", "a  b", "日本 語", " \n x"])
def test_leading_spaces_come_back(text):
    model = loaded()
    ids = model.encode(text)
    assert model.tokenizer.decode(ids) == text
    pieces = [model.tokenizer.decode(ids[: i + 1]) for i in range(len(ids))]
    assert pieces[-1] == text
    assert pieces[0].startswith(text[:1]) or "\ufffd" in pieces[0]
