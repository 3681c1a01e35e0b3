"""The edge: what the model and the pool say about a request before it is queued."""

from __future__ import annotations

import dataclasses

from pagedjax.engine.beams import BeamGroup, make_search
from pagedjax.engine.group import Continuation, RequestGroup
from pagedjax.engine.stops import TextStream
from pagedjax.errors import InvalidRequestError
from pagedjax.runner import NewRow
from pagedjax.sampling import row_values, uses_counts
from pagedjax.scheduler import Sequence
from pagedjax.types import MAX_LOGPROBS, Request, SamplingParams
from pagedjax.weights import LoadedModel


def check_prompt(prompt_ids: tuple[int, ...], *, vocab_size: int, max_model_len: int) -> None:
    """Raises InvalidRequestError for an empty prompt, one without room for a token after it, or an unknown id.

    JAX clamps a gather out of range without a word, so a bad id must not get past here.
    """
    if not prompt_ids:
        raise InvalidRequestError("prompt", "is empty; at least one token is needed")
    if len(prompt_ids) >= max_model_len:
        raise InvalidRequestError(
            "prompt",
            f"has {len(prompt_ids)} tokens; with at least one to generate, at most {max_model_len - 1} fit (the longest "
            f"sequence is {max_model_len} tokens)",
        )
    for token in prompt_ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise InvalidRequestError("prompt", f"token ids are integers, got {token!r}")
        if not 0 <= token < vocab_size:
            raise InvalidRequestError("prompt", f"token id {token} is not in the vocabulary of {vocab_size} tokens")


def make_group(
    request: Request, loaded: LoadedModel, *, max_model_len: int, rank: int, namespace: int, seed: int
) -> RequestGroup:
    """Check a request against the model and set up its n sequences, with ranks rank, rank + 1, ...

    A request whose max_tokens go past the longest sequence ends there, with finish reason `length`.
    """
    vocab_size, sampling = loaded.spec.vocab_size, request.sampling
    check_prompt(request.prompt_ids, vocab_size=vocab_size, max_model_len=max_model_len)
    if loaded.tokenizer is None and sampling.detokenize:
        raise InvalidRequestError("detokenize", "the model has no tokenizer; only token ids can be had")
    longest = max_model_len - len(request.prompt_ids)
    max_new = longest if sampling.max_tokens is None else min(sampling.max_tokens, longest)
    if sampling.min_tokens > max_new:
        raise InvalidRequestError(
            "min_tokens", f"only {max_new} tokens fit after this prompt, got {sampling.min_tokens}"
        )
    continuations: list[Continuation] = []
    values_of = _beam_sampling if sampling.beam_width else lambda x: x
    for index in range(sampling.beam_width or sampling.n):
        sequence = Sequence.start(
            request, index=index, rank=rank + index, max_total=len(request.prompt_ids) + max_new, namespace=namespace
        )
        if continuations:
            sequence.parent = continuations[0].sequence
        values = row_values(
            values_of(sampling),
            vocab_size=vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            seed=seed,
            sample_index=index,
        )
        text = TextStream(loaded.tokenizer, sampling, request.prompt_ids) if sampling.detokenize else None
        continuations.append(Continuation(sequence, values, text))
    if sampling.beam_width:
        return BeamGroup(request, continuations, search=make_search(request, tuple(loaded.eos_token_ids), max_new))
    return RequestGroup(request, continuations)


def _beam_sampling(sampling: SamplingParams) -> SamplingParams:
    """What the device does for a beam: report the likeliest tokens, end nothing."""
    return dataclasses.replace(
        sampling, beam_width=0, n=1, temperature=0.0, ignore_eos=True, logprobs=MAX_LOGPROBS, detokenize=False
    )


def new_row(continuation: Continuation, row: int, *, reads_cache: bool, num_reserved: int = 0) -> NewRow:
    """The device's part of an admission: `continuation` gets `row`, with all it knows, and pages if some are reserved."""
    sequence = continuation.sequence
    return NewRow(
        row=row,
        token_ids=sequence.known_ids,
        prompt_len=sequence.prompt_len,
        max_tokens=sequence.max_total,
        match_tokens=sequence.match_tokens if reads_cache else 1,
        namespace=sequence.namespace,
        sampling=continuation.sampling,
        uses_counts=uses_counts(sequence.request.sampling),
        num_reserved=num_reserved,
    )
