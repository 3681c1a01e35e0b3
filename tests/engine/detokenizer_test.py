"""Pieces joined are the decoded whole; no character is broken or late; the cost stays bounded."""

import codecs
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.engine.detokenizer import IncrementalDetokenizer, token_texts
from tests.engine import tokenizers_for_tests as small

REPLACEMENT = "\ufffd"
many_ids = st.lists(st.integers(0, 10**6), max_size=40)
quick = settings(max_examples=150, deadline=None, derandomize=True)


def pieces(tokenizer, ids, skip=True, prompt=()):
    stream = IncrementalDetokenizer(tokenizer, skip, prompt)
    return [*(stream.append([i]) for i in ids), stream.flush()]


def whole(tokenizer, ids, skip=True):
    return tokenizer.decode(ids, skip_special_tokens=skip)


def folded(tokenizer, ids):
    """Any integers as ids of the tokenizer, some just beyond its vocabulary."""
    return [i % (tokenizer.get_vocab_size() + 2) for i in ids]


def byte_tokens(tokenizer, text):
    """The text, every byte a token of its own."""
    if tokenizer is small.byte_level():
        by_byte = {token_texts(tokenizer).spell(i): i for i in range(tokenizer.get_vocab_size())}
        return [by_byte[bytes([b])] for b in text.encode()]
    return [tokenizer.token_to_id(f"<0x{b:02X}>") for b in text.encode()]


@quick
@given(ids=many_ids, skip=st.booleans())
def test_byte_level_equals_decode_for_any_ids(ids, skip):
    tokenizer = small.byte_level()
    ids = folded(tokenizer, ids)
    assert "".join(pieces(tokenizer, ids, skip)) == whole(tokenizer, ids, skip)


@quick
@given(ids=many_ids, skip=st.booleans(), make=st.sampled_from([small.metaspace, small.wordpiece]))
def test_decoders_without_bytes_equal_decode_for_any_ids(ids, skip, make):
    tokenizer = make()
    ids = folded(tokenizer, ids)
    assert "".join(pieces(tokenizer, ids, skip)) == whole(tokenizer, ids, skip)


def parts_of_sentencepiece():
    """Lists of ids without broken characters: whole tokens, and characters spelled in bytes."""
    tokenizer = small.sentencepiece()
    size = tokenizer.get_vocab_size()
    token = st.sampled_from([0, *range(257, size), size + 1]).map(lambda i: [i])
    spelled = st.text(min_size=1, max_size=2).map(
        lambda s: byte_tokens(tokenizer, s.encode("utf-8", "ignore").decode())
    )
    return st.lists(token | spelled, max_size=20).map(lambda parts: list(itertools.chain(*parts)))


@quick
@given(ids=parts_of_sentencepiece(), skip=st.booleans())
def test_sentencepiece_equals_decode(ids, skip):
    tokenizer = small.sentencepiece()
    expected = whole(tokenizer, ids, skip)
    assert "".join(pieces(tokenizer, ids, skip)) == expected
    assert "".join(pieces(small.wrapped(tokenizer), ids, skip)) == expected
    assert "".join(pieces(small.windowed_sentencepiece(), ids, skip)) == expected


@quick
@given(ids=many_ids)
def test_broken_bytes_of_sentencepiece_break_nothing_else(ids):
    """transformers replaces every byte of a run of byte tokens as soon as one is wrong; here the sound ones stay."""
    tokenizer = small.sentencepiece()
    ids = folded(tokenizer, ids)
    texts = token_texts(tokenizer)
    raw = b"".join(texts.spell(i) for i in ids if i not in texts.special).decode("utf-8", "replace")
    assert "".join(pieces(tokenizer, ids)) == raw.removeprefix(" ")


@pytest.mark.parametrize("make", [small.byte_level, small.sentencepiece], ids=lambda f: f.__name__)
@pytest.mark.parametrize("text", ["🙂", "好天気", "ž", "a🙂bž好", "👩‍👩‍👧", "é\u0301"])
def test_characters_come_whole_and_at_once(make, text):
    tokenizer = make()
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    expected = [decoder.decode(bytes([b])) for b in text.encode()]
    got = pieces(tokenizer, byte_tokens(tokenizer, text))
    assert got == [*expected, ""]


@pytest.mark.parametrize("make", [small.byte_level, small.sentencepiece], ids=lambda f: f.__name__)
@pytest.mark.parametrize("text", ["🙂", "x🙂", "🙂🙂", "好"])
def test_a_cut_character_is_one_replacement_at_the_end(make, text):
    tokenizer = make()
    size = len(text[-1].encode())
    for missing in range(1, size):
        got = pieces(tokenizer, byte_tokens(tokenizer, text)[:-missing])
        assert "".join(got[:-1]) == text[:-1]
        assert got[-1] == REPLACEMENT


def test_a_token_may_end_in_the_middle_of_a_character():
    """A merged token of a whole character and a part of the next one."""
    tokenizer = small.byte_level()
    texts = token_texts(tokenizer)
    ids = byte_tokens(tokenizer, "好")
    stream = IncrementalDetokenizer(tokenizer)
    texts_bytes = "a好".encode()
    assert [stream.append([byte_tokens(tokenizer, "a")[0], *ids[:2]]), stream.append(ids[2:])] == ["a", "好"]
    assert b"".join(texts.spell(i) for i in [byte_tokens(tokenizer, "a")[0], *ids]) == texts_bytes


def test_replacement_characters_that_the_model_writes_are_kept():
    tokenizer = small.byte_level()
    ids = tokenizer.encode("a\ufffdb \ufffd").ids
    assert "".join(pieces(tokenizer, ids)) == "a\ufffdb \ufffd"


@pytest.mark.parametrize("text", [" one", "  two", "The  fox", "\n x"])
def test_leading_spaces(text):
    byte_level, sentencepiece = small.byte_level(), small.sentencepiece()
    ids = byte_level.encode(text).ids
    assert "".join(pieces(byte_level, ids)) == whole(byte_level, ids) == text
    ids = [sentencepiece.token_to_id("▁"), *byte_tokens(sentencepiece, text)]  # SentencePiece's own dummy prefix
    assert "".join(pieces(sentencepiece, ids)) == whole(sentencepiece, ids) == text


@pytest.mark.parametrize("wrap", [lambda t: t, small.wrapped], ids=["native", "transformers"])
@pytest.mark.parametrize(
    "make", [small.sentencepiece, small.windowed_sentencepiece, small.metaspace], ids=lambda f: f.__name__
)
def test_words_do_not_run_together(make, wrap):
    native = make()
    tokenizer = wrap(native)
    the, fox, end = (native.token_to_id(t) for t in ("▁The", "▁fox", "<|end|>"))
    assert pieces(tokenizer, [the, fox]) == ["The", " fox", ""]
    assert pieces(tokenizer, [the, end, fox]) == ["The", "", " fox", ""]
    assert pieces(tokenizer, [end, the, end, end, fox]) == ["", "The", "", "", " fox", ""]
    assert pieces(tokenizer, [the, end, fox], skip=False) == ["The", "<|end|>", " fox", ""]
    assert pieces(tokenizer, [fox], prompt=[the]) == [" fox", ""]
    assert pieces(tokenizer, [fox], prompt=[end]) == ["fox", ""]
    assert pieces(tokenizer, [the, 9999, fox]) == ["The", "", " fox", ""]


@pytest.mark.parametrize("make", [small.byte_level, small.sentencepiece], ids=lambda f: f.__name__)
def test_a_prompt_may_end_inside_a_character(make):
    tokenizer = make()
    ids = byte_tokens(tokenizer, "a🙂b")
    assert pieces(tokenizer, ids[3:], prompt=ids[:3]) == ["", "🙂", "b", ""]


def test_cost_per_token_is_bounded():
    class Counting:
        """Not a fast tokenizer: only `decode`."""

        def __init__(self):
            self.longest = 0

        def decode(self, ids, **_):
            self.longest = max(self.longest, len(ids))
            return small.windowed_sentencepiece().decode(ids, skip_special_tokens=False)

    tokenizer = Counting()
    native = small.sentencepiece()
    for ids in ([0xF0 + 1] * 500, [native.token_to_id("▁")] * 500, [10**6] * 500, byte_tokens(native, "好" * 200)):
        stream = IncrementalDetokenizer(tokenizer)
        text = stream.append(ids) + stream.flush()
        assert text == whole(native, ids)
    assert tokenizer.longest <= 40


@pytest.mark.parametrize("make", [small.byte_level, small.sentencepiece, small.metaspace], ids=lambda f: f.__name__)
def test_usual_tokenizers_need_no_window(make):
    assert token_texts(make()).rules is not None
    assert token_texts(small.wordpiece()).rules is None
