"""Stop strings in text that comes in pieces, and the text of one sequence with them applied."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Any

from pagedjax.engine.detokenizer import IncrementalDetokenizer
from pagedjax.types import SamplingParams


class _Matcher:
    """Knuth-Morris-Pratt: how much of one stop string the text ends with, a constant time per character."""

    def __init__(self, pattern: str):
        self.pattern = pattern
        self.matched = 0
        self._border = [0] * (len(pattern) + 1)  # longest proper border of each prefix
        k = 0
        for i in range(1, len(pattern)):
            while k and pattern[k] != pattern[i]:
                k = self._border[k]
            k += pattern[k] == pattern[i]
            self._border[i + 1] = k

    def feed(self, character: str) -> bool:
        """Whether the pattern is complete with this character."""
        if self.matched == len(self.pattern):
            self.matched = self._border[self.matched]
        while self.matched and self.pattern[self.matched] != character:
            self.matched = self._border[self.matched]
        self.matched += self.pattern[self.matched] == character
        return self.matched == len(self.pattern)

    @property
    def may_become(self) -> int:
        """Characters at the end of the text that could be the beginning of a match still to come."""
        return self._border[self.matched] if self.matched == len(self.pattern) else self.matched


class StopChecker:
    """Lets text through up to the first stop string; holds back what may turn out to be the beginning of one.

    The first stop string is the one that is complete first; of several that end together, the longest. That does not
    depend on how the text was cut into pieces.

    Args:
      stop_strings: not empty ones.
      include_stop: let the stop string itself through.

    Attributes:
      stopped: the stop string that was found; from then on nothing comes out.
    """

    def __init__(self, stop_strings: Sequence[str], include_stop: bool = False):
        if not all(stop_strings):
            raise ValueError("stop_strings: an empty string would stop every text at once")
        self.stopped: str | None = None
        self._matchers = [_Matcher(s) for s in stop_strings]
        self._include_stop = include_stop
        self._held: deque[tuple[str, bool]] = deque()

    def feed(self, text: str, *, visible: bool = True, can_stop: bool = True) -> str:
        """The text that is now certain to come before any stop string.

        Args:
          text: the next piece.
          visible: False for text that stop strings are looked for in, but that never comes out.
          can_stop: False lets stop strings that are complete within this piece pass.
        """
        if self.stopped is not None:
            return ""
        if not self._matchers:
            return text if visible else ""
        for character in text:
            self._held.append((character, visible))
            complete = [m.pattern for m in self._matchers if m.feed(character)]
            if complete and can_stop:
                self.stopped = max(complete, key=len)
                out = self._release(len(self.stopped))
                self._held.clear()
                return out + self.stopped if self._include_stop else out
        return self._release(max(m.may_become for m in self._matchers))

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        return self._release(0)

    def _release(self, num_kept: int) -> str:
        taken = [self._held.popleft() for _ in range(len(self._held) - num_kept)]
        return "".join([character for character, visible in taken if visible])


@dataclasses.dataclass(frozen=True)
class TextDelta:
    """What new ids did to a sequence's text.

    Attributes:
      text: new text that is final.
      num_tokens_kept: how many of the new ids remain: all, or up to the one that completed a stop string.
      stop_reason: that stop string, None where there is none.
    """

    text: str
    num_tokens_kept: int
    stop_reason: str | None = None


class TextStream:
    """The text of one sequence, with its stop strings. Where there is no tokenizer the text is empty.

    Stop strings are looked for in the text as it would read with special tokens written out, so that the text of a
    special token stops the sequence even where special tokens are skipped. A stop string that is complete before
    `min_tokens` tokens does not count.

    Args:
      tokenizer: see `IncrementalDetokenizer`; None for none.
      sampling: its skip_special_tokens, stop, include_stop_str_in_output and min_tokens are used.
      prompt_ids: the prompt, whose text this one continues.
    """

    def __init__(self, tokenizer: Any | None, sampling: SamplingParams, prompt_ids: Sequence[int] = ()):
        self._detokenizer = (
            None if tokenizer is None else IncrementalDetokenizer(tokenizer, sampling.skip_special_tokens, prompt_ids)
        )
        self._checker = StopChecker(sampling.stop, sampling.include_stop_str_in_output)
        self._looks = bool(sampling.stop)
        self._min_tokens = sampling.min_tokens
        self._num_tokens = 0

    def append(self, new_ids: Sequence[int]) -> TextDelta:
        """Take over generated ids. After a stop string was found, call no more."""
        if self._detokenizer is None:
            return TextDelta("", len(new_ids))
        if not self._looks:
            return TextDelta(self._detokenizer.append(new_ids), len(new_ids))
        text = ""
        for i, token_id in enumerate(new_ids):
            self._num_tokens += 1
            can_stop = self._num_tokens >= self._min_tokens
            hidden = self._detokenizer.hidden_text(token_id)
            piece = hidden or self._detokenizer.step(token_id)
            text += self._checker.feed(piece, visible=not hidden, can_stop=can_stop)
            if self._checker.stopped is not None:
                return TextDelta(text, i + 1, self._checker.stopped)
        return TextDelta(text, len(new_ids))

    def finish(self) -> str:
        """The rest of the text, when the sequence ended by something else than a stop string."""
        if self._detokenizer is None:
            return ""
        return self._checker.feed(self._detokenizer.flush(), can_stop=False) + self._checker.flush()
