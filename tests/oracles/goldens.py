"""The stored answers of transformers on packaged models, and the rule by which others may differ from them.

Greedy output is compared token for token. The only excuse is a near tie: a margin between the two best
log-probabilities below the tolerance (1e-3 in float32, 0.1 in bfloat16) at the first difference; in float32 the other
token must be the runner-up. What follows is another text and is not compared. `scripts/make_goldens` makes the files.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import pathlib
from collections.abc import Sequence
from typing import Any

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "goldens"
NEAR_TIE_F32 = 1e-3
NEAR_TIE_BF16 = 0.1


@dataclasses.dataclass(frozen=True)
class GreedyGolden:
    """A prompt and its argmax continuation in float32, end-of-sequence ignored; one entry a new token but in `ids`.

    Attributes:
      name: `text/...`, `chat/...`, `random/<length>`, `cut/<length>` or `long/<length>`.
      ids: the prompt.
      tokens: the most likely token; its natural log-probability is in `logprobs`.
      runners_up: the second most likely one.
      margins: log-probability of the first minus that of the second.
      first_eos: index in `tokens` of the first end-of-sequence token, None where there is none.
    """

    name: str
    ids: tuple[int, ...]
    tokens: tuple[int, ...]
    runners_up: tuple[int, ...]
    margins: tuple[float, ...]
    logprobs: tuple[float, ...]
    first_eos: int | None


@functools.cache
def _load(name: str) -> dict[str, Any]:
    return json.loads(gzip.decompress((FOLDER / name).read_bytes()))


def greedy(model: str = "smollm2") -> dict[str, GreedyGolden]:
    """All greedy goldens of "smollm2" or "gemma3" by name, in the order they were made."""
    out = {}
    for item in _load(f"{model}_greedy.json.gz")["prompts"]:
        fields = {key: tuple(value) if isinstance(value, list) else value for key, value in item.items()}
        out[item["name"]] = GreedyGolden(**fields)
    return out


def prompt_logprobs(model: str = "smollm2") -> dict[str, dict[str, list]]:
    """By prompt name: `logprobs`, `ranks` (from 1), `top_ids`, `top_logprobs`; one entry a token from the second on."""
    return _load(f"{model}_greedy.json.gz")["prompt_logprobs"]


def last_logits(model: str = "smollm2") -> dict[str, dict[str, Any]]:
    """By prompt name: the last position's 50 largest `logits` with their `ids`, and `logsumexp` over the vocabulary."""
    return _load(f"{model}_greedy.json.gz")["last_logits"]


def eos_token_id() -> int:
    return _load("smollm2_greedy.json.gz")["eos_token_id"]


def beams() -> list[dict[str, Any]]:
    """Beam searches: `name`, `ids`, `width`, `max_new`, `length_penalty`, `early_stopping` and `hypotheses`, best first, each
    with its generated `tokens` and its `score`."""
    return _load("smollm2_beams.json.gz")["cases"]


def strings(model: str = "smollm2") -> list[dict[str, Any]]:
    """`text`, its `ids`, and `decoded` (special tokens included)."""
    return _load(f"{model}_tokenizer.json.gz")["strings"]


def chats() -> list[dict[str, Any]]:
    """`name`, `messages`, `add_generation_prompt`, the rendered `text` and its `ids`."""
    return _load("smollm2_tokenizer.json.gz")["chats"]


def assert_tokens_match(golden: GreedyGolden, tokens: Sequence[int], tol: float = NEAR_TIE_F32) -> bool:
    """Compares a continuation (perhaps shorter) with the golden; True where it was excused by a near tie.

    Raises AssertionError with the place, both tokens and the margin where they differ without excuse, or where
    `tokens` is longer than the golden.
    """
    assert len(tokens) <= len(golden.tokens), (
        f"{golden.name}: {len(tokens)} tokens, the golden has {len(golden.tokens)}"
    )
    for step, (token, expected) in enumerate(zip(tokens, golden.tokens, strict=False)):
        if int(token) == expected:
            continue
        near_tie = golden.margins[step] < tol
        # In bfloat16 a third candidate may lie inside the tolerance too; in float32 only the runner-up can.
        if near_tie and (int(token) == golden.runners_up[step] or tol > NEAR_TIE_F32):
            return True
        raise AssertionError(
            f"{golden.name}: new token {step} is {int(token)}, expected {expected} "
            f"(runner-up {golden.runners_up[step]}, margin {golden.margins[step]:g}, tolerance {tol:g})"
        )
    return False


def assert_all_match(
    continuations: dict[str, Sequence[int]],
    tol: float = NEAR_TIE_F32,
    max_excused: int = 2,
    model: str = "smollm2",
) -> int:
    """`assert_tokens_match` for several goldens by name; returns how many were excused (at most `max_excused`)."""
    goldens = greedy(model)
    excused = [name for name, tokens in continuations.items() if assert_tokens_match(goldens[name], tokens, tol)]
    assert len(excused) <= max_excused, f"{len(excused)} near ties, at most {max_excused} expected: {excused}"
    return len(excused)
