"""Text and bytes of single tokens, for log-probabilities."""

from __future__ import annotations

import functools
import re
from typing import Any

_HEX_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the others follow from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(others)}


class Vocabulary:
    """Single tokens of a tokenizer (transformers' interface), or of none: then all are empty."""

    def __init__(self, tokenizer: Any | None):
        self._tokenizer = tokenizer
        self._alphabet = _byte_alphabet()
        self._added = {int(i) for i in (getattr(tokenizer, "added_tokens_decoder", None) or {})}
        # Byte-level pieces write a space as U+0120, SentencePiece ones as U+2581.
        space = tokenizer.encode("a a", add_special_tokens=False) if tokenizer is not None else []
        self._byte_level = any("\u0120" in self.piece(i) for i in space)
        self.bytes = functools.lru_cache(maxsize=65536)(self._bytes)

    def piece(self, token_id: int) -> str:
        """The token as the vocabulary writes it; empty for ids without one (vocabularies are padded)."""
        return (self._tokenizer.convert_ids_to_tokens([token_id])[0] or "") if self._tokenizer is not None else ""

    def _bytes(self, token_id: int) -> bytes:
        piece = self.piece(token_id)
        if token_id in self._added:
            return piece.encode()
        if self._byte_level and all(c in self._alphabet for c in piece):
            return bytes(self._alphabet[c] for c in piece)
        if match := _HEX_PIECE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace("\u2581", " ").encode()

    def text(self, token_id: int) -> str:
        """The token's text; part of a character shows as U+FFFD."""
        return self.bytes(token_id).decode("utf-8", "replace")
