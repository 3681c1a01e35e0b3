"""What became of one request, and how a stream's chunks add up to it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any


@dataclasses.dataclass
class Outcome:
    """Attributes:
    error: why it failed; empty: it succeeded.
    status: of the HTTP answer, 0 where there was none.
    scheduled, start: seconds from the start of the run to when it was due, and to when it was sent.
    ttft: seconds from sending it to the first chunk with output.
    latency: seconds from sending it to the last chunk.
    itls: seconds between chunks with output.
    prompt_len: tokens, as the server counts them where it says so.
    output_len: tokens; 0 until they are counted (see `count_output`).
    counted_by: "usage", "token_ids", "tokenizer" or "chunks".
    """

    scheduled: float = 0.0
    start: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    itls: list[float] = dataclasses.field(default_factory=list)
    text: str = ""
    prompt_len: int = 0
    output_len: int = 0
    counted_by: str = ""
    num_chunks: int = 0
    cached_tokens: int = 0
    finish_reason: str = ""
    error: str = ""
    status: int = 0

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def tpot(self) -> float:
        """Seconds per output token behind the first; 0 where there is no second one."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0

    @property
    def normalized_latency(self) -> float:
        """Seconds per output token, all of the latency included (Kwon et al., SOSP 2023, section 6.1)."""
        return self.latency / self.output_len if self.output_len else 0.0


class StreamError(Exception):
    """The server's answer is not what a stream of completions should be."""


class Collector:
    """Turns the events of one stream into an Outcome.

    Args:
      outcome: filled as events come.
      chat: events are chat completions.
    """

    def __init__(self, outcome: Outcome, *, chat: bool):
        self.outcome, self._chat = outcome, chat
        self._texts: list[str] = []
        self._num_ids = 0
        self._usage: dict[str, Any] = {}
        self._last = 0.0
        self.done = False

    def add(self, data: bytes, seconds: float) -> None:
        """One event, received `seconds` after the request was sent. StreamError where it says that something failed."""
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise StreamError(f"an event that is not JSON: {data[:200]!r}") from None
        if not isinstance(event, dict):
            raise StreamError(f"an event that is not an object: {data[:200]!r}")
        if event.get("error"):
            raise StreamError(error_text(event))
        self._usage = event.get("usage") or self._usage
        choices = event.get("choices")
        if choices:
            self._choices(choices, seconds)

    def _choices(self, choices: list[dict[str, Any]], seconds: float) -> None:
        has_output = False
        for choice in choices:
            part = choice.get("delta") or {} if self._chat else choice
            texts = (part.get(name) for name in ("content", "text", "reasoning_content", "reasoning"))
            text = "".join(t for t in texts if isinstance(t, str))
            ids = choice.get("token_ids") or part.get("token_ids") or ()
            reason = choice.get("finish_reason")
            if reason:
                self.outcome.finish_reason = str(reason)
            self._texts.append(text)
            self._num_ids += len(ids)
            # A completion's chunk without text holds a token whose text is held back; a chat's first names the role.
            silent = not self._chat and not reason
            has_output = has_output or bool(text or ids or part.get("tool_calls") or silent)
        outcome = self.outcome
        outcome.latency = seconds
        if has_output:
            if outcome.num_chunks == 0:
                outcome.ttft = seconds
            else:
                outcome.itls.append(seconds - self._last)
            self._last = seconds
            outcome.num_chunks += 1

    def finish(self) -> None:
        """At the end of the stream. StreamError where it broke off."""
        outcome = self.outcome
        outcome.text = "".join(self._texts)
        if not (self.done or outcome.finish_reason):
            raise StreamError("the stream ended without [DONE] and without a finish reason")
        if outcome.num_chunks == 0:
            outcome.ttft = outcome.latency
        completion, prompt = self._usage.get("completion_tokens"), self._usage.get("prompt_tokens")
        if isinstance(completion, int):
            outcome.output_len, outcome.counted_by = completion, "usage"
        elif self._num_ids:
            outcome.output_len, outcome.counted_by = self._num_ids, "token_ids"
        if isinstance(prompt, int) and prompt > 0:
            outcome.prompt_len = prompt
        outcome.cached_tokens = (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def error_text(body: Any) -> str:
    """The message of an error body, in any of the usual shapes."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return error if isinstance(error, str) else json.dumps(error)[:500]
