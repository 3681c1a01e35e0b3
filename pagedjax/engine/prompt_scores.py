"""Log-probabilities of prompt tokens, chunk by chunk as they are computed."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import jax
import numpy as np

from pagedjax.engine.group import RequestGroup
from pagedjax.runner import LaneResult, Runner
from pagedjax.scheduler import Sequence


def score_prompts(
    runner: Runner,
    groups: Mapping[str, RequestGroup],
    lanes: Seq[tuple[Sequence, int]],
    results: Seq[LaneResult],
    hidden: jax.Array,
) -> None:
    """Give requests that want them the log-probabilities of the prompt tokens in a mixed step.

    Args:
      lanes: (sequence, number of tokens) of the step, before their counts were moved on.
      results: of the lanes; those that are not ok were left out of the step.
      hidden: [T, d] of the step.
    """
    offset = 0
    for (sequence, q_len), result in zip(lanes, results, strict=True):
        if not result.ok:
            continue
        group = groups[sequence.request.request_id]
        start, length = sequence.num_computed, sequence.prompt_len
        if sequence.index == 0 and group.request.sampling.prompt_logprobs is not None and start < length:
            following = sequence.token_ids[start + 1 : min(start + q_len + 1, length)]
            next_ids = np.concatenate([np.zeros(offset, np.int32), following])
            out = runner.score(hidden, next_ids)
            group.take_prompt_logprobs(start, type(out)(*(field[offset:] for field in out)), following)
        offset += q_len
