"""Logits to tokens, vectorised per row: penalties, bias, temperature, top-k, top-p, min-p, seeds, log-probabilities."""

from pagedjax.sampling.logprobs import MIN_LOGPROB, LogprobsOutput, host_logprobs, logprobs_of, prompt_logprobs
from pagedjax.sampling.params import (
    NUM_STOP,
    RowSampling,
    check_vocabulary,
    init_row_sampling,
    is_stop,
    row_values,
    set_rows,
    stack_rows,
    uses_counts,
)
from pagedjax.sampling.penalties import add_tokens, init_token_counts, reset_counts
from pagedjax.sampling.sample import SampleOutput, sample

__all__ = [
    "MIN_LOGPROB",
    "NUM_STOP",
    "LogprobsOutput",
    "RowSampling",
    "SampleOutput",
    "add_tokens",
    "check_vocabulary",
    "host_logprobs",
    "init_row_sampling",
    "init_token_counts",
    "is_stop",
    "logprobs_of",
    "prompt_logprobs",
    "reset_counts",
    "row_values",
    "sample",
    "set_rows",
    "stack_rows",
    "uses_counts",
]
