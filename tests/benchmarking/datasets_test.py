"""Datasets: lengths exact in tokens, sharing as described, errors that name the file and the line."""

import collections
import json

import numpy as np
import pytest
from tokenizers import Tokenizer as CoreTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from pagedjax.benchmarking import lengths
from pagedjax.benchmarking.datasets import make_requests
from pagedjax.benchmarking.files import read_trace
from pagedjax.benchmarking.prompts import IdPrompts, Segment, TextPrompts, Tokenizer
from pagedjax.benchmarking.workload import DatasetOptions
from pagedjax.errors import ConfigError
from tests.server.fakes import TOKENIZER

BYTES = Tokenizer(TOKENIZER)


def word_tokenizer():
    """Words behind a space as single tokens, everything else byte by byte; <s> is put ahead of every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    merges = []
    for word in ("then", "there", "this", "that", "stone", "notes"):
        piece = "Ġ"
        for letter in word:
            if piece + letter not in vocab:
                vocab[piece + letter] = len(vocab)
                merges.append((piece, letter))
            piece += letter
    vocab["<s>"] = len(vocab)
    core = CoreTokenizer(models.BPE(vocab=vocab, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>")


WORDS = Tokenizer(word_tokenizer())


def make(maker="ids", tokenizer=BYTES, num_warmups=0, **given):
    options = DatasetOptions(**{"num_prompts": 20, "output_len": 5, **given})
    makers = {
        "ids": lambda: IdPrompts(tokenizer.plain_ids, options.seed, tokenizer),
        "text": lambda: TextPrompts(tokenizer, options.seed),
        "chat": lambda: TextPrompts(tokenizer, options.seed, special=False),
    }
    return make_requests(options, makers[maker](), tokenizer, num_warmups)


def count(tokenizer, prompt, special=True):
    return len(prompt) if isinstance(prompt, tuple) else tokenizer.count(prompt, special=special)


@pytest.mark.parametrize("maker", ["ids", "text", "chat"])
@pytest.mark.parametrize("tokenizer", [BYTES, WORDS], ids=["bytes", "words"])
@pytest.mark.parametrize(
    "given",
    [
        {"input_len": 40, "range_ratio": 0.5, "prefix_len": 8},
        {"dataset_name": "prefix_repetition", "num_prefixes": 3, "prefix_len": 16, "input_len": 7},
        {"dataset_name": "synthetic", "profile": "alpaca"},
    ],
    ids=lambda given: given.get("dataset_name", "random"),
)
def test_generated_prompts_are_exactly_as_long_as_they_say(maker, tokenizer, given):
    requests, _ = make(maker, tokenizer, **given)
    assert len(requests) == 20
    for request in requests:
        assert count(tokenizer, request.prompt, special=maker != "chat") == request.prompt_len
    assert len({r.prompt for r in requests}) == 20
    again, _ = make(maker, tokenizer, **given)
    other, _ = make(maker, tokenizer, **given, seed=1)
    assert requests == again
    assert not {r.prompt for r in requests} & {r.prompt for r in other}


def test_no_special_token_is_drawn():
    maker = IdPrompts(BYTES.plain_ids, 0)
    drawn = set(maker.compose([Segment((0,), 20_000)]))
    assert drawn == set(range(256))
    assert 257 in TOKENIZER.all_special_ids


def test_random_lengths():
    requests, _ = make(input_len=100, output_len=50, range_ratio=0.2, num_prompts=3000)
    for name, low, high in (("prompt_len", 80, 120), ("output_len", 40, 60)):
        found = [getattr(r, name) for r in requests]
        assert (min(found), max(found)) == (low, high)
        assert np.mean(found) == pytest.approx((low + high) / 2, rel=0.02)
    exact, _ = make(input_len=100, output_len=50)
    assert {(r.prompt_len, r.output_len) for r in exact} == {(100, 50)}


def test_words_are_single_tokens():
    text = TextPrompts(WORDS, 0).compose([Segment((0,), 50)])
    assert len(text.split()) == 49, "and one token that the tokenizer adds"
    assert all(WORDS.count(f" {word}", special=False) == 1 for word in text.split())


@pytest.mark.parametrize("tokenizer", [BYTES, WORDS], ids=["bytes", "words"])
def test_texts_share_the_tokens_of_their_prefix(tokenizer):
    given = {"dataset_name": "prefix_repetition", "num_prefixes": 3, "prefix_len": 16, "input_len": 4}
    requests, _ = make("text", tokenizer, **given)
    assert sorted(collections.Counter(tuple(tokenizer.encode(r.prompt)[:16]) for r in requests).values()) == [6, 7, 7]


def test_a_shared_prefix_is_shared():
    requests, _ = make(input_len=10, prefix_len=6)
    assert len({r.prompt[:6] for r in requests}) == 1
    assert len({r.prompt[:7] for r in requests}) > 10
    requests, _ = make(dataset_name="prefix_repetition", num_prefixes=3, prefix_len=16, input_len=4, num_prompts=20)
    groups = collections.Counter(r.prompt[:16] for r in requests)
    assert sorted(groups.values()) == [6, 7, 7]


def test_more_prompts_begin_with_the_same_ones_and_warm_ups_are_others():
    few, _ = make(input_len=30, range_ratio=0.5, num_prompts=5)
    many, warm_ups = make(input_len=30, range_ratio=0.5, num_prompts=9, num_warmups=3)
    assert many[:5] == few
    assert len(warm_ups) == 3
    assert not {r.prompt for r in warm_ups} & {r.prompt for r in many}


@pytest.mark.parametrize("name", lengths.PROFILES)
def test_synthetic_lengths_have_the_published_means(name):
    profile = lengths.PROFILES[name]
    inputs, outputs = lengths.draw(profile, 40_000, np.random.default_rng(0))
    for found, mean in ((inputs, profile.prompt_mean), (outputs, profile.output_mean)):
        assert abs(found.mean() - mean) < 4 * found.std() / 200  # standard errors of the mean
        assert found.min() >= 4
        assert found.max() <= 1024
    assert lengths.PROFILES["sharegpt"].prompt_mean == 161.31


SHAREGPT = [
    {"conversations": [{"from": "human", "value": "0123456789"}, {"from": "gpt", "value": "abcdef"}]},
    {"conversations": [{"from": "human", "value": "xyz"}, {"from": "gpt", "value": "too short a prompt"}]},
    {"conversations": [{"from": "human", "value": "long enough"}, {"from": "gpt", "value": "abc"}]},
    {"conversations": [{"from": "human", "value": "p" * 1024}, {"from": "gpt", "value": "a" * 1024}]},
    {"conversations": [{"from": "human", "value": "q" * 1024}, {"from": "gpt", "value": "a" * 1025}]},
    {"conversations": [{"from": "human", "value": "r" * 1025}, {"from": "gpt", "value": "a" * 10}]},
    {"conversations": [{"from": "human", "value": "alone, without an answer"}]},
    {"something": "else"},
]


def test_sharegpt_is_filtered_as_usual(tmp_path):
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(SHAREGPT))
    given = {"dataset_name": "sharegpt", "dataset_path": str(path), "num_prompts": 5}
    found, _ = make(**given, output_len=0, shuffle=False)
    assert [(r.prompt[0], r.prompt_len, r.output_len) for r in found] == [
        ("0", 10, 6),
        ("p", 1024, 1024),
        ("0", 10, 6),  # repeated, since there are only two
        ("p", 1024, 1024),
        ("0", 10, 6),
    ]
    found, _ = make(**given, output_len=0, oversample=False)
    assert sorted(r.prompt_len for r in found) == [10, 1024]
    # With a length given, an answer's own does not count.
    found, _ = make(**given, output_len=9, oversample=False)
    assert {(r.prompt[0], r.output_len) for r in found} == {("0", 9), ("l", 9), ("p", 9), ("q", 9)}


def test_custom_lines(tmp_path):
    path = tmp_path / "custom.jsonl"
    messages = [{"role": "user", "content": "hi"}]
    lines = [{"prompt": "abc", "output_tokens": 7}, {"prompt": [5, 6]}, {"messages": messages, "output_tokens": 2}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    given = {"dataset_name": "custom", "dataset_path": str(path), "output_len": 0, "shuffle": False, "num_prompts": 3}
    found, _ = make(**given)
    assert [(r.prompt, r.prompt_len, r.output_len) for r in found] == [("abc", 3, 7), ((5, 6), 2, 256), ("hi", 2, 2)]
    assert found[2].messages == tuple(messages)


@pytest.mark.parametrize("maker", ["ids", "text", "chat"])
def test_text_is_cut_to_length(tmp_path, maker):
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(f"line number {i} of this stone there" for i in range(9)))
    given = {"dataset_name": "text", "dataset_path": str(path), "prefix_len": 20, "input_len": 300, "num_prompts": 3}
    found, _ = make(maker, WORDS, **given)
    assert [count(WORDS, r.prompt, maker != "chat") for r in found] == [r.prompt_len for r in found] == [320] * 3
    assert len({r.prompt[:12] for r in found}) == 1
    assert len({r.prompt for r in found}) == 3


def test_traces(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 5000, "input_length": 20, "output_length": 3, "hash_ids": [1, 2, 9]},
        {"timestamp": 4000, "input_length": 16, "output_length": 4, "hash_ids": [1, 2]},
        {"timestamp": 7000, "input_length": 19, "output_length": 5, "hash_ids": [1, 4]},
        {"timestamp": 9000, "input_length": 7, "output_length": 6},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    given = {"dataset_name": "timed_trace", "dataset_path": str(path), "trace_block_size": 8, "output_len": 0}
    found, _ = make(**given)
    assert [r.arrival for r in found] == [0.0, 1.0, 3.0, 5.0]
    assert [(r.prompt_len, r.output_len) for r in found] == [(16, 4), (20, 3), (19, 5), (7, 6)]
    assert all(len(r.prompt) == r.prompt_len for r in found)
    first, second, third, _ = (r.prompt for r in found)
    assert second[:16] == first
    assert third[:8] == first[:8]
    assert third[8:16] != first[8:16]
    faster = read_trace(DatasetOptions(**given, trace_sec_multiplier=1e-4))
    assert [e.arrival for e in faster] == pytest.approx([0, 0.1, 0.3, 0.5])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("sharegpt", "{", "is not JSON"),
        ("sharegpt", "{}", "must be a JSON list"),
        ("sharegpt", "[]", "no request in it can be used"),
        ("custom", '{"prompt": "a"}\n{"x": 1}', "line 2: needs a prompt"),
        ("custom", "[1]", "line 1 must be an object"),
        (
            "custom",
            '{"prompt": "a", "output_tokens": 0}',
            "line 1: output_tokens must be a whole number of at least 1, got 0",
        ),
        ("timed_trace", '{"timestamp": "x"}', "line 1: timestamp must be a number"),
        ("timed_trace", '{"timestamp": 1, "input_length": 5}', "line 1: output_length"),
        ("timed_trace", '{"timestamp": 1, "hash_ids": 5}', "line 1: hash_ids"),
        ("timed_trace", "", "has no request"),
        ("text", "\n \n", "has no text"),
        ("text", None, "cannot be read"),
        ("random", None, ""),
    ],
)
def test_bad_files(tmp_path, name, content, words):
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_text(content)
    if name == "random":
        with pytest.raises(ConfigError, match="--dataset_path: needed"):
            make(dataset_name="sharegpt")
        return
    with pytest.raises(ConfigError, match=words) as caught:
        make(dataset_name=name, dataset_path=str(path), output_len=0)
    assert str(path) in str(caught.value)


def test_a_text_shorter_than_what_the_tokenizer_adds():
    with pytest.raises(ConfigError, match="adds 1 of its own"):
        TextPrompts(WORDS, 0).compose([Segment((0,), 1)])
    assert TextPrompts(WORDS, 0, special=False).compose([Segment((0,), 1)])
