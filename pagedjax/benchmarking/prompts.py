"""Prompts of exactly so many tokens: as token ids, or as a text that the tokenizer cuts into as many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from pagedjax.errors import ConfigError

_PROBED_IDS = 4096
_WANTED_WORDS = 1024
_FILLERS = (" a", "a", " the", " 1", ".", "\n", " I", "-")


class Segment(NamedTuple):
    """A stretch of a prompt: the same key, length and seed make the same tokens, wherever it stands.

    key: what tells it from others.
    length: in tokens.
    """

    key: tuple[int, ...]
    length: int


class PromptMaker(Protocol):
    """Makes prompts of exact lengths."""

    def compose(self, segments: Sequence[Segment]) -> str | tuple[int, ...]:
        """A prompt of random content, one segment behind the other; as many tokens as the segments together."""

    def fit(self, text: str, num_tokens: int) -> str | tuple[int, ...]:
        """A prompt of `num_tokens` tokens that begins as `text` does."""


class Tokenizer:
    """What benchmarks need of a tokenizer.

    Args:
      tokenizer: transformers' interface.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
        self.plain_ids = np.array([i for i in range(len(tokenizer)) if i not in special], np.int64)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids; `special`: with those that the model's own rule puts around a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=special))

    def count(self, text: str, *, special: bool = True) -> int:
        return len(self.encode(text, special=special))

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids))


class IdPrompts:
    """Prompts as token ids, drawn from all that are not special. See PromptMaker.

    Args:
      ids: i[n], the ids to draw from.
      tokenizer: for `fit`; None where prompts are only composed.
    """

    def __init__(self, ids: np.ndarray, seed: int, tokenizer: Tokenizer | None = None):
        if len(ids) < 1:
            raise ConfigError("--tokenizer: has no plain tokens to draw prompts from")
        self._ids, self._seed, self._tokenizer = ids, seed, tokenizer

    def compose(self, segments: Sequence[Segment]) -> tuple[int, ...]:
        parts = [_rng(self._seed, s.key).integers(0, len(self._ids), s.length) for s in segments]
        return tuple(self._ids[np.concatenate(parts)].tolist()) if parts else ()

    def fit(self, text: str, num_tokens: int) -> tuple[int, ...]:
        assert self._tokenizer is not None
        ids = self._tokenizer.encode(text, special=False)
        if len(ids) < num_tokens:
            raise ConfigError(f"the text has {len(ids)} tokens; a prompt of {num_tokens} was asked for")
        return tuple(ids[:num_tokens])


class TextPrompts:
    """Prompts as text, each verified by tokenizing it. See PromptMaker.

    Random content is words that are one token each behind a space, where the vocabulary has such.

    Args:
      special: whether the special tokens that the tokenizer adds count.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int, *, special: bool = True):
        self._tokenizer, self._seed, self._special = tokenizer, seed, special
        self._words = _single_token_words(tokenizer)
        self._added = tokenizer.count("", special=special)

    def compose(self, segments: Sequence[Segment]) -> str:
        total = sum(s.length for s in segments)
        if total <= self._added:
            raise ConfigError(
                f"a text of {total} tokens was asked for, but the tokenizer adds {self._added} of its own to every text"
            )
        # Segment by segment, so that none loses its tokens to another one, and equal beginnings are equal texts.
        text, length = "", 0
        for segment in segments:
            length += segment.length
            drawn = _rng(self._seed, segment.key).integers(0, len(self._words), segment.length)
            text += "".join(self._words[i] for i in drawn)
            if length > self._added:
                text = self.fit(text, length)
        return text

    def fit(self, text: str, num_tokens: int) -> str:
        """`text` with characters cut off or filler words added until it has exactly num_tokens tokens."""
        for _ in range(200):
            count = self._tokenizer.count(text, special=self._special)
            missing = num_tokens - count
            if missing == 0:
                return text
            if count > 2 * num_tokens:
                text = text[: 3 * len(text) * num_tokens // (2 * count)]
                continue
            if missing < 0:  # a token is a character or more, so this does not cut too far (else fillers follow)
                text = text[:missing]
                continue
            longer = (text + filler * n for n in {missing, 1} for filler in _FILLERS)
            best = max(longer, key=lambda t: self._closeness(t, num_tokens))
            text = best if self._closeness(best, num_tokens) > -missing else text[:-1]
        raise ConfigError(f"found no text of exactly {num_tokens} tokens; send token ids (--prompt_format=ids)")

    def _closeness(self, text: str, num_tokens: int) -> float:
        """How few tokens are missing, negated; texts that are too long are no candidates."""
        missing = num_tokens - self._tokenizer.count(text, special=self._special)
        return -missing if missing >= 0 else -np.inf


def _single_token_words(tokenizer: Tokenizer) -> list[str]:
    """Words, each behind a space, that take one token behind another word; letters where the vocabulary has no such."""
    ids = tokenizer.plain_ids
    if len(ids) > _PROBED_IDS:
        ids = np.random.default_rng(0).choice(ids, _PROBED_IDS, replace=False)
    base = tokenizer.count("a a", special=False)
    words: list[str] = []
    for token in ids.tolist():
        word = tokenizer.decode([token]).strip()
        if 2 <= len(word) <= 12 and word.isascii() and word.isalpha() and word not in words:
            if tokenizer.count(f"a {word} a", special=False) == base + 1:
                words.append(word)
            if len(words) == _WANTED_WORDS:
                break
    return [f" {word}" for word in words] or list("abcdefghijklmnopqrstuvwxyz")


def _rng(seed: int, key: tuple[int, ...]) -> np.random.Generator:
    return np.random.default_rng([seed, *key])
