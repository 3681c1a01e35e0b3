"""Token ids to text as they come: no character is broken, and the pieces joined are the decoded whole.

The cost of a token does not depend on how many came before. For the two families that matter, byte-level BPE and
SentencePiece with byte fallback, a token is a fixed string of bytes, and an incremental UTF-8 decoder does the rest.
Tokenizers with another decoder go through a short window of ids that is decoded again for every token.
"""

from __future__ import annotations

import codecs
import dataclasses
import json
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
"""What bytes that are no UTF-8 decode to."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PROMPT_TAIL = 8
"""Prompt tokens that can matter for how the text goes on: a character is at most four of them."""


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the rest goes up from U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(rest)}


_ALPHABET = _byte_alphabet()


@dataclasses.dataclass(frozen=True)
class _Rules:
    """How a token becomes bytes, and what is taken from the beginning of the text.

    Attributes:
      byte_level: the token is written in the alphabet of byte-level BPE.
      byte_fallback: a token <0xNN> is one byte.
      replacements: strings to replace in every token.
      strip: character that is dropped from the beginning of the text, at most num_strip times.
      first_drops: character that is dropped from the first token wherever it stands there.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    strip: str = ""
    num_strip: int = 0
    first_drops: str = ""


def _rules_of(decoder: dict[str, Any]) -> _Rules | None:
    """Rules for a decoder of the tokenizers library, from its own description; None if it needs more than these."""
    kind = decoder.get("type")
    if kind == "ByteLevel":
        return _Rules(byte_level=True)
    if kind == "Metaspace":
        mark = decoder["replacement"]
        first = mark if decoder.get("prepend_scheme", "always") != "never" else ""
        return _Rules(replacements=((mark, " "),), first_drops=first)
    if kind != "Sequence":
        return None
    rules, fused = _Rules(), False
    for part in decoder["decoders"]:
        kind = part["type"]
        if kind == "ByteLevel" and len(decoder["decoders"]) == 1:
            rules = _Rules(byte_level=True)
        elif kind == "Replace" and "String" in part["pattern"] and not fused:
            pair = (part["pattern"]["String"], part["content"])
            rules = dataclasses.replace(rules, replacements=(*rules.replacements, pair))
        elif kind == "ByteFallback" and not fused:
            rules = dataclasses.replace(rules, byte_fallback=True)
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and part["stop"] == 0 and not rules.num_strip:
            rules = dataclasses.replace(rules, strip=part["content"], num_strip=part["start"])
        else:
            return None
    return rules


class TokenTexts:
    """What each token stands for. One per tokenizer, see `token_texts`.

    Attributes:
      special: id -> text of the tokens that `skip_special_tokens` leaves out.
      rules: None where a token's bytes depend on its neighbours (then `spell` must not be called).
    """

    def __init__(self, tokenizer: Any):
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        added = backend.get_added_tokens_decoder() if hasattr(backend, "get_added_tokens_decoder") else {}
        self.special = {i: token.content for i, token in added.items() if token.special}
        decoder = getattr(backend, "decoder", None)
        self.rules = _rules_of(json.loads(decoder.__getstate__())) if decoder is not None else None
        # Not the tokenizer itself: it is the key under which this object is kept.
        self._id_to_token = backend.id_to_token if self.rules is not None else None
        self._spelled: dict[int, bytes] = {}

    def spell(self, token_id: int) -> bytes:
        """The token's share of the text in UTF-8, perhaps part of a character; empty for an id without a token."""
        found = self._spelled.get(token_id)
        if found is None:
            found = self._spelled[token_id] = self._bytes_of(token_id)
        return found

    def spell_first(self, token_id: int) -> bytes:
        """The same where the token is the first of all."""
        assert self.rules is not None
        return self._bytes_of(token_id, self.rules.first_drops) if self.rules.first_drops else self.spell(token_id)

    def _bytes_of(self, token_id: int, drop: str = "") -> bytes:
        assert self._id_to_token is not None
        assert self.rules is not None
        token = self._id_to_token(token_id)
        if token is None:
            return b""
        if self.rules.byte_level and all(c in _ALPHABET for c in token):
            return bytes(_ALPHABET[c] for c in token)
        if self.rules.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if drop:
            token = token.replace(drop, "")
        for old, new in self.rules.replacements:
            token = token.replace(old, new)
        return token.encode("utf-8", "replace")


_TEXTS: weakref.WeakKeyDictionary[Any, TokenTexts] = weakref.WeakKeyDictionary()


def token_texts(tokenizer: Any) -> TokenTexts:
    """The tokenizer's table, made on first use: transformers' fast tokenizers and `tokenizers.Tokenizer`."""
    if not hasattr(tokenizer, "backend_tokenizer"):
        return TokenTexts(tokenizer)  # it would be its own key, and stay for ever
    if (found := _TEXTS.get(tokenizer)) is None:
        found = _TEXTS[tokenizer] = TokenTexts(tokenizer)
    return found


class _Stream(Protocol):
    def step(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class _ByteStream:
    """Tokens are bytes. Bytes that are no UTF-8 give one U+FFFD for every maximal part of a character (Unicode 3.9)."""

    def __init__(self, texts: TokenTexts, prompt_ids: Sequence[int]):
        assert texts.rules is not None
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        starts = not any(texts.spell(i) for i in prompt_ids)
        self._first = starts and bool(texts.rules.first_drops)
        self._num_strip = texts.rules.num_strip if starts else 0
        for token_id in prompt_ids[-_PROMPT_TAIL:]:
            self._decoder.decode(texts.spell(token_id))

    def step(self, token_id: int) -> str:
        raw = self._texts.spell_first(token_id) if self._first else self._texts.spell(token_id)
        self._first = self._first and not self._texts.spell(token_id)
        return self._stripped(self._decoder.decode(raw))

    def flush(self) -> str:
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if self._num_strip and text:
            assert self._texts.rules is not None
            while self._num_strip and text.startswith(self._texts.rules.strip):
                text = text.removeprefix(self._texts.rules.strip)
                self._num_strip -= 1
            if text:
                self._num_strip = 0
        return text


class _WindowStream:
    """Any decoder: a few ids are decoded again with each new one, and what the text grew by is new.

    Text is held while it ends in U+FFFD (perhaps part of a character), but not beyond _MAX_PENDING tokens.
    """

    _MAX_PENDING = 8
    _MAX_CONTEXT = 24

    def __init__(self, decode: Callable[[list[int]], str], prompt_ids: Sequence[int]):
        self._decode = lambda ids: decode(ids) if ids else ""
        self._context = list(prompt_ids[-_PROMPT_TAIL:])
        self._context_text = self._decode(self._context).rstrip(REPLACEMENT)
        self._pending: list[int] = []

    def step(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        if text.endswith(REPLACEMENT) and len(self._pending) < self._MAX_PENDING:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        return self._emit(self._decode(self._context + self._pending)) if self._pending else ""

    def _emit(self, text: str) -> str:
        new = text[len(self._context_text) :]
        # Without text before them, the next tokens would lose their space: keep older ids where the newest have none.
        newest_text = self._decode(self._pending)
        if newest_text.strip():
            self._context, self._context_text = self._pending, newest_text
        else:
            self._context = (self._context + self._pending)[-self._MAX_CONTEXT :]
            self._context_text = self._decode(self._context)
        self._pending = []
        return new


class IncrementalDetokenizer:
    """Text of one sequence as its ids come.

    What `append` and `flush` return, joined, is the decoded whole. One exception: where a model writes bytes that are
    no UTF-8 by SentencePiece's byte tokens, this gives U+FFFD for the broken part, not for every byte around it.

    Args:
      tokenizer: transformers' fast tokenizer or `tokenizers.Tokenizer`.
      skip_special_tokens: leave special tokens out of the text.
      prompt_ids: what the ids continue. A space at the beginning of the text is kept where a prompt stands before it.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()):
        texts = token_texts(tokenizer)
        self._hidden = texts.special if skip_special_tokens else {}
        # Special tokens of the prompt are no text that words could run into.
        prompt_ids = [i for i in prompt_ids if i not in texts.special]
        self._stream: _Stream
        if texts.rules is not None:
            self._stream = _ByteStream(texts, prompt_ids)
        else:
            keywords: dict[str, Any] = {"skip_special_tokens": False}
            if hasattr(tokenizer, "backend_tokenizer") or not hasattr(tokenizer, "decoder"):
                keywords["clean_up_tokenization_spaces"] = False
            self._stream = _WindowStream(lambda ids: tokenizer.decode(ids, **keywords), prompt_ids)

    def hidden_text(self, token_id: int) -> str:
        """What a special token that is left out would have read; empty for all others."""
        return self._hidden.get(token_id, "")

    def step(self, token_id: int) -> str:
        """The text that one more id completes."""
        return "" if token_id in self._hidden else self._stream.step(token_id)

    def append(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete."""
        return "".join([self.step(i) for i in token_ids])

    def flush(self) -> str:
        """The rest, when no more ids come: at most one U+FFFD for a character that was cut."""
        return self._stream.flush()
