"""What a dispatch brought for one sequence: new tokens, new text, perhaps its end."""

from __future__ import annotations

from pagedjax.engine.group import Continuation
from pagedjax.runner import LaneResult, RowStatus
from pagedjax.types import FinishReason


def take_result(continuation: Continuation, result: LaneResult) -> int:
    """Append a lane's new tokens to its sequence and its text, and decide whether it ended.

    Returns:
      tokens kept; a stop string cuts what came after it.
    """
    sequence, ids = continuation.sequence, result.samples.tokens.tolist()
    if ids:
        before = sequence.num_tokens
        sequence.append(ids)
        kept, stop_reason = _extend_text(continuation, ids, result.status)
        if stop_reason is not None:
            ids = ids[:kept]
            sequence.cut(before + kept)
            continuation.finish_reason, continuation.stop_reason = FinishReason.STOP, stop_reason
        elif result.status is RowStatus.STOPPED:
            continuation.finish_reason = FinishReason.STOP
            if ids[-1] in sequence.request.sampling.stop_token_ids:
                continuation.stop_reason = ids[-1]
        elif result.status is RowStatus.FULL:
            continuation.finish_reason = FinishReason.LENGTH
        continuation.take(ids, result.samples)
        if continuation.finish_reason is not None and continuation.text is not None and stop_reason is None:
            continuation.new_text += continuation.text.finish()
    sequence.update_phase()
    return len(ids)


def _extend_text(continuation: Continuation, ids: list[int], status: RowStatus) -> tuple[int, str | int | None]:
    """(tokens kept, stop reason): a stop string in the text cuts what came after it."""
    if continuation.text is None:
        return len(ids), None
    sampling = continuation.sequence.request.sampling
    # The id that ended the sequence is reported, but is no part of its text.
    hides_last = status is RowStatus.STOPPED and not sampling.include_stop_str_in_output
    delta = continuation.text.append(ids[:-1] if hides_last else ids)
    continuation.new_text += delta.text
    return delta.num_tokens_kept, delta.stop_reason
