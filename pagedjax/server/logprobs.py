"""Log-probabilities in the forms of the completions and the chat endpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pagedjax.server.rendering import finite
from pagedjax.server.vocabulary import Vocabulary
from pagedjax.types import Logprob, TokenLogprobs


def completion_logprobs(
    vocabulary: Vocabulary,
    entries: Sequence[TokenLogprobs | None],
    ids: Sequence[int],
    offset: int,
    name: Callable[[int], str] | None = None,
) -> dict[str, list]:
    """{"tokens", "token_logprobs", "top_logprobs", "text_offset"}.

    Args:
      vocabulary: of the model.
      entries: one a token; None where there is none (a prompt's first token).
      ids: the tokens, for entries that are None.
      offset: characters of the choice's text before the first of them.
      name: how to write a token; default: its text.
    """
    name = name or vocabulary.text
    out: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token_id, entry in zip(ids, entries, strict=True):
        out["tokens"].append(name(token_id))
        out["text_offset"].append(offset)
        offset += len(vocabulary.text(token_id))
        if entry is None:
            out["token_logprobs"].append(None)
            out["top_logprobs"].append(None)
            continue
        out["token_logprobs"].append(finite(entry.chosen.logprob))
        top: dict[str, float | None] = {}
        for candidate in (*entry.top, entry.chosen):
            top.setdefault(name(candidate.token_id), finite(candidate.logprob))
        out["top_logprobs"].append(top)
    return out


def chat_logprobs(vocabulary: Vocabulary, entries: Sequence[TokenLogprobs]) -> dict[str, list]:
    """{"content": [{"token", "logprob", "bytes", "top_logprobs": [...]}]}."""

    def one(candidate: Logprob) -> dict[str, Any]:
        raw = vocabulary.bytes(candidate.token_id)
        return {
            "token": raw.decode("utf-8", "replace"),
            "logprob": finite(candidate.logprob),
            "bytes": list(raw),
        }

    return {"content": [{**one(e.chosen), "top_logprobs": [one(c) for c in e.top]} for e in entries]}


def prompt_logprobs(vocabulary: Vocabulary, entries: Sequence[TokenLogprobs | None]) -> list[dict | None]:
    """The extension `prompt_logprobs`: null for the first token, then {id: {"logprob", "rank", "decoded_token"}}."""

    def table(entry: TokenLogprobs) -> dict[str, dict]:
        return {
            str(c.token_id): {
                "logprob": finite(c.logprob),
                "rank": c.rank,
                "decoded_token": vocabulary.text(c.token_id),
            }
            for c in (entry.chosen, *entry.top)
        }

    return [None if entry is None else table(entry) for entry in entries]
