"""Stop strings: found wherever they lie, nothing of them ever comes out, and the same however the text is cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.engine.stops import StopChecker, TextDelta, TextStream
from pagedjax.types import SamplingParams
from tests.engine import tokenizers_for_tests as small

quick = settings(max_examples=300, deadline=None, derandomize=True)
short = st.text("ab<", max_size=8)
stop_lists = st.lists(st.text("ab<", min_size=1, max_size=5), max_size=4)


def first_stop(text, stops):
    """(start, stop string) of the one that ends first, of several that end together the longest; or None."""
    found = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    return (min(found)[0] + min(found)[1], min(found)[2]) if found else None


@quick
@given(parts=st.lists(short, max_size=8), stops=stop_lists, include=st.booleans())
def test_equals_search_in_the_whole_text(parts, stops, include):
    checker, out = StopChecker(stops, include), []
    for part in parts:
        out.append(checker.feed(part))
        seen = "".join(parts[: len(out)])
        if first_stop(seen, stops) is None:
            # What is held back is exactly the longest beginning of a stop string that the text ends with.
            held = max((n for s in stops for n in range(len(s)) if seen.endswith(s[:n])), default=0)
            assert "".join(out) == seen[: len(seen) - held]
    text = "".join(parts)
    found = first_stop(text, stops)
    if found is None:
        assert checker.stopped is None
        assert "".join(out) + checker.flush() == text
    else:
        start, stop = found
        assert checker.stopped == stop
        assert "".join(out) == text[:start] + (stop if include else "")
        assert checker.feed("more") + checker.flush() == ""


@quick
@given(parts=st.lists(st.tuples(short, st.booleans()), max_size=8), stops=stop_lists)
def test_invisible_text_is_searched_but_never_shown(parts, stops):
    checker = StopChecker(stops)
    out = "".join(checker.feed(text, visible=visible) for text, visible in parts) + checker.flush()
    text = "".join(text for text, _ in parts)
    shown = [visible for part, visible in parts for _ in part]
    found = first_stop(text, stops)
    end = len(text) if found is None else found[0]
    assert out == "".join(c for c, visible in zip(text[:end], shown, strict=False) if visible)
    assert checker.stopped == (found and found[1])


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="stop_strings"):
        StopChecker(["a", ""])


def test_cost_of_a_long_stop_string_is_linear():
    checker = StopChecker(["a" * 20_000 + "b"])
    out = "".join(checker.feed("a") for _ in range(60_000))
    assert len(out) == 40_000
    assert checker.feed("b") == ""
    assert checker.stopped is not None


def stream_of(tokenizer=None, prompt=(), **asked):
    return TextStream(tokenizer or small.byte_level(), SamplingParams(max_tokens=1000, **asked), prompt)


def feed(stream, ids, size=1):
    """(text, tokens kept, stop reason) after feeding ids in slices of `size`."""
    text, kept = "", 0
    for start in range(0, len(ids), size):
        delta = stream.append(ids[start : start + size])
        text, kept = text + delta.text, kept + delta.num_tokens_kept
        if delta.stop_reason is not None:
            return text, kept, delta.stop_reason
    return text + stream.finish(), kept, None


TEXT = small.TEXTS[0] + small.TEXTS[1]


@quick
@given(
    start=st.integers(0, len(TEXT) - 1),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    size=st.sampled_from([1, 3, 8, 1000]),
    include=st.booleans(),
)
def test_streams_equal_the_whole_text_and_count_tokens(start, lengths, size, include):
    tokenizer = small.byte_level()
    stops = [TEXT[start : start + n] for n in lengths]
    ids = tokenizer.encode(TEXT).ids
    text, kept, reason = feed(stream_of(stop=stops, include_stop_str_in_output=include), ids, size)
    where, stop = first_stop(TEXT, stops)
    assert reason == stop
    assert text == TEXT[:where] + (stop if include else "")
    # The kept tokens contain the stop string, one fewer do not.
    assert stop in tokenizer.decode(ids[:kept])
    assert stop not in tokenizer.decode(ids[: kept - 1])


def test_a_stop_string_over_two_tokens():
    tokenizer = small.byte_level()
    ids = tokenizer.encode(TEXT).ids
    texts = [tokenizer.decode([i]) for i in ids]
    k = next(k for k in range(5, len(texts)) if len(texts[k]) > 1 and len(texts[k + 1]) > 1)
    stop = texts[k][-2:] + texts[k + 1][:2]
    stream, pieces = stream_of(stop=stop), []
    while not pieces or pieces[-1].stop_reason is None:
        pieces.append(stream.append([ids[len(pieces)]]))
    assert len(pieces) == k + 2
    assert pieces[-1] == TextDelta("", 1, stop)
    assert "".join(p.text for p in pieces) == TEXT[: TEXT.index(stop)]


class TestSpecialTokens:
    @pytest.fixture(params=["byte_level", "sentencepiece"])
    def tokenizer(self, request):
        return getattr(small, request.param)()

    def ids(self, tokenizer, *tokens):
        found = [tokenizer.token_to_id(t) for t in tokens]
        assert None not in found
        return found

    @pytest.mark.parametrize("skip", [True, False])
    @pytest.mark.parametrize("size", [1, 9])
    def test_its_text_as_a_stop_string_stops(self, tokenizer, skip, size):
        ids = self.ids(tokenizer, "e", "<|end|>", "s")
        stream = stream_of(tokenizer, stop=["<|end|>"], skip_special_tokens=skip)
        assert feed(stream, ids, size) == ("e", 2, "<|end|>")

    def test_with_text_before_it(self, tokenizer):
        stream = stream_of(tokenizer, stop=["s<|end|>"])
        assert feed(stream, self.ids(tokenizer, "e", "s", "<|end|>")) == ("e", 3, "s<|end|>")
        stream = stream_of(tokenizer, stop=["s<|end|>"])
        assert feed(stream, self.ids(tokenizer, "e", "s", "<|start|>")) == ("es", 3, None)

    def test_included_when_asked(self, tokenizer):
        stream = stream_of(tokenizer, stop=["<|end|>"], include_stop_str_in_output=True)
        assert feed(stream, self.ids(tokenizer, "e", "<|end|>")) == ("e<|end|>", 2, "<|end|>")

    def test_skipped_or_not_without_stops(self, tokenizer):
        ids = self.ids(tokenizer, "e", "<|end|>", "s")
        assert feed(stream_of(tokenizer), ids) == ("es", 3, None)
        assert feed(stream_of(tokenizer, skip_special_tokens=False), ids) == ("e<|end|>s", 3, None)


def test_a_stop_string_before_min_tokens_does_not_count():
    tokenizer = small.byte_level()
    ids = tokenizer.encode("fox fox fox").ids
    full = feed(stream_of(stop="fox", min_tokens=0), ids)
    later = feed(stream_of(stop="fox", min_tokens=full[1] + 1), ids)
    assert full[0] == ""
    assert later[0] == "fox "
    assert full[1] < later[1] <= len(ids)
    assert feed(stream_of(stop="fox", min_tokens=999), ids) == ("fox fox fox", len(ids), None)


def test_a_cut_character_at_the_end():
    tokenizer = small.byte_level()
    ids = [tokenizer.token_to_id(c) for c in ("a", "ð", "Ł")]  # "a" and the first two bytes of an emoji
    for stop in ([], ["zz"], ["a\ufffdz"]):
        assert feed(stream_of(stop=stop), ids) == ("a\ufffd", 3, None)


def test_without_a_tokenizer_there_is_no_text():
    stream = TextStream(None, SamplingParams())
    assert stream.append([1, 2]) == TextDelta("", 2)
    assert stream.finish() == ""
