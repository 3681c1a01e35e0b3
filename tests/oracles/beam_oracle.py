"""Beam search the slow way: every hypothesis is a whole sequence, all of them are sorted, nothing is shared."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Logprobs = Callable[[Sequence[int]], np.ndarray]  # ids -> f64[V] of the next token


def search(
    logprobs: Logprobs,
    prompt: Sequence[int],
    width: int,
    end_ids: set[int],
    max_new: int,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
) -> list[tuple[tuple[int, ...], float]]:
    """The `width` best (generated ids, score), best first, by the rules that `pagedjax.engine.beam` states."""
    open_beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    ended: list[tuple[tuple[int, ...], float]] = []
    for length in range(1, max_new + 1):
        everything = []
        for ids, total in open_beams:
            values = logprobs([*prompt, *ids])
            everything += [((*ids, t), total + float(values[t])) for t in range(len(values))]
        everything.sort(key=lambda h: -h[1])
        considered = everything[: max(2, 1 + len(end_ids)) * width]

        def is_ended(ids: tuple[int, ...], length: int = length) -> bool:
            return ids[-1] in end_ids or length == max_new

        ended += [(ids, total / length**length_penalty) for ids, total in considered[:width] if is_ended(ids)]
        ended = sorted(ended, key=lambda h: -h[1])[:width]
        open_beams = [h for h in considered if not is_ended(h[0])][:width]
        if not open_beams:
            break
        if len(ended) == width:
            reach = max_new if early_stopping == "never" and length_penalty > 0 else length
            if early_stopping is True or open_beams[0][1] / reach**length_penalty <= ended[-1][1]:
                break
    return ended
