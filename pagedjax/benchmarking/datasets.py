"""Requests of every dataset by name."""

from __future__ import annotations

import dataclasses

import numpy as np

from pagedjax.benchmarking import files, lengths
from pagedjax.benchmarking.prompts import PromptMaker, Segment, Tokenizer
from pagedjax.benchmarking.workload import BenchRequest, DatasetOptions
from pagedjax.errors import ConfigError

# First element of a segment's key: what kind of stretch it is.
_OWN, _PREFIX, _BLOCK = 0, 1, 2
FILES = ("sharegpt", "text", "custom", "timed_trace")
_INPUT_LEN = {"random": 1024, "prefix_repetition": 256, "text": 512}
_PREFIX_LEN = {"prefix_repetition": 256, "text": 128}


def make_requests(
    given: DatasetOptions, maker: PromptMaker, tokenizer: Tokenizer | None, num_warmups: int = 0
) -> tuple[list[BenchRequest], list[BenchRequest]]:
    """(requests, warm-ups). Warm-ups are of the same kind, but of their own content: they leave nothing cached that counts.

    Args:
      given: the options.
      maker: makes prompts of exact lengths.
      tokenizer: counts the tokens of texts; needed for files with texts.

    Raises:
      ConfigError: a file that cannot be read or has too little; names it and the line.
    """
    given = _with_defaults(given)
    if given.dataset_name in FILES:
        requests = _from_file(given, maker, tokenizer)
    else:
        # Content depends on a request's number, so more requests begin with the same ones.
        requests = _generated(dataclasses.replace(given, num_prompts=given.num_prompts + num_warmups), maker)
        return requests[: given.num_prompts], requests[given.num_prompts :]
    shapes = [requests[i % len(requests)] for i in range(num_warmups)]
    own = [Segment((_OWN, given.num_prompts + i), r.prompt_len) for i, r in enumerate(shapes)]
    warm_ups = [BenchRequest(maker.compose([s]), s.length, r.output_len) for s, r in zip(own, shapes, strict=True)]
    return requests, warm_ups


def _with_defaults(given: DatasetOptions) -> DatasetOptions:
    name = given.dataset_name
    if name in FILES and not given.dataset_path:
        raise ConfigError(f"--dataset_path: needed for --dataset_name={name}")
    return dataclasses.replace(
        given,
        input_len=given.input_len or _INPUT_LEN.get(name, 0),
        prefix_len=_PREFIX_LEN.get(name, 0) if given.prefix_len < 0 else given.prefix_len,
    )


def _generated(given: DatasetOptions, maker: PromptMaker) -> list[BenchRequest]:
    rng = np.random.default_rng([given.seed, 2])
    num, output_len = given.num_prompts, given.output_len or 128
    if given.dataset_name == "synthetic":
        inputs, outputs = lengths.draw(lengths.PROFILES[given.profile], num, rng)
        if given.output_len:
            outputs = np.full(num, given.output_len)
        prefixes = np.full(num, -1)
    elif given.dataset_name == "random":
        # Each from a generator of its own, so that a run with more requests begins with the same ones.
        inputs = lengths.around(given.input_len, given.range_ratio, num, np.random.default_rng([given.seed, 3]))
        outputs = lengths.around(output_len, given.range_ratio, num, np.random.default_rng([given.seed, 4]))
        prefixes = np.zeros(num, np.int64)
    else:
        inputs, outputs = np.full(num, given.input_len), np.full(num, output_len)
        prefixes = np.random.default_rng([given.seed, 5]).permutation(np.arange(num) % given.num_prefixes)
    out = []
    for i, (own, output, prefix) in enumerate(zip(inputs.tolist(), outputs.tolist(), prefixes.tolist(), strict=True)):
        segments = [Segment((_OWN, i), own)]
        if prefix >= 0 and given.prefix_len:
            segments.insert(0, Segment((_PREFIX, prefix), given.prefix_len))
        out.append(BenchRequest(maker.compose(segments), sum(s.length for s in segments), output))
    return out


def _from_file(given: DatasetOptions, maker: PromptMaker, tokenizer: Tokenizer | None) -> list[BenchRequest]:
    if given.dataset_name == "timed_trace":
        return _trace(given, maker)
    if tokenizer is None:
        raise ConfigError(f"--tokenizer: needed for --dataset_name={given.dataset_name}")
    if given.dataset_name == "sharegpt":
        return files.read_sharegpt(given, tokenizer)
    if given.dataset_name == "custom":
        return files.read_custom(given, tokenizer)
    return files.read_text(given, maker)


def _trace(given: DatasetOptions, maker: PromptMaker) -> list[BenchRequest]:
    """Requests of a trace: prompts share the content of blocks with the same hash id."""
    out = []
    for number, entry in enumerate(files.read_trace(given)):
        left, segments = entry.input_length, []
        for block in entry.hash_ids:
            if left <= 0:
                break
            # A whole block is the same content everywhere; so is the same part of one.
            segments.append(Segment((_BLOCK, block), min(given.trace_block_size, left)))
            left -= segments[-1].length
        if left > 0:
            segments.append(Segment((_OWN, number), left))
        prompt = maker.compose(segments)
        out.append(BenchRequest(prompt, entry.input_length, given.output_len or entry.output_length, entry.arrival))
    return out
