"""What transformers' beam search answers: part of `make.py`."""

from __future__ import annotations

import sys
import time

import torch

NAMES = (
    "text/capital", "text/recipe", "text/story", "text/science", "text/history", "text/letter", "text/list",
    "text/numbers", "text/python", "text/c_code", "text/json", "text/sql", "text/markdown", "text/french",
    "text/czech", "text/emoji", "chat/paris", "chat/turns", "cut/127", "cut/257",
)  # fmt: skip
PLAIN = {"max_new": 12, "length_penalty": 1.0, "early_stopping": False}
# Settings that move the end: prompts whose beams meet the end id within a few tokens.
SPECIAL = (
    {"max_new": 24, "length_penalty": 1.0, "early_stopping": True},
    {"max_new": 24, "length_penalty": 2.0, "early_stopping": "never"},
    {"max_new": 24, "length_penalty": -1.0, "early_stopping": False},
    {"max_new": 24, "length_penalty": 0.0, "early_stopping": "never"},
)


@torch.inference_mode()
def search(model, ids: list[int], width: int, end_id: int, settings: dict) -> dict:
    """All `width` hypotheses, best first: generated ids and scores."""
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        max_new_tokens=settings["max_new"],
        length_penalty=settings["length_penalty"],
        early_stopping=settings["early_stopping"],
        eos_token_id=end_id,
        pad_token_id=end_id,
        return_dict_in_generate=True,
        output_scores=True,
    )
    hypotheses = []
    for sequence, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        new = sequence[len(ids) :]
        if end_id in new:
            new = new[: new.index(end_id) + 1]
        hypotheses.append({"tokens": new, "score": round(score, 6)})
    return {"width": width, **settings, "hypotheses": hypotheses}


def make_beams(model, items: dict[str, list[int]], end_id: int) -> dict:
    """items: ids of a prompt by name."""
    cases = []
    for name in NAMES:
        started = time.perf_counter()
        for width in (2, 4, 6):
            cases.append({"name": name, "ids": items[name], **search(model, items[name], width, end_id, PLAIN)})
        print(f"beams of {name}: {time.perf_counter() - started:.1f} s", file=sys.stderr)
    for name in ("chat/paris", "text/numbers"):
        for settings in SPECIAL:
            cases.append({"name": name, "ids": items[name], **search(model, items[name], 4, end_id, settings)})
    return {"eos_token_id": end_id, "cases": cases}
