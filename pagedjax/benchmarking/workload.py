"""What a benchmark sends: one request, and the options that say which requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pagedjax.options import option

DATASETS = ("random", "prefix_repetition", "synthetic", "sharegpt", "text", "custom", "timed_trace")


@dataclasses.dataclass(frozen=True)
class BenchRequest:
    """One request.

    Attributes:
      prompt: token ids, or a text.
      prompt_len: its tokens, special ones that the tokenizer adds included.
      output_len: most tokens to generate; with `ignore_eos` exactly so many.
      arrival: seconds after the start at which it is sent, where the dataset says so.
      messages: a conversation in place of the prompt (chat only; prompt is then its text).
    """

    prompt: str | tuple[int, ...]
    prompt_len: int
    output_len: int
    arrival: float | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None


@dataclasses.dataclass(frozen=True)
class DatasetOptions:
    """Which requests."""

    dataset_name: str = option(
        "random",
        "random: random tokens. prefix_repetition: random tokens behind one of a few shared prefixes. synthetic: lengths "
        "distributed around the published means of --profile. sharegpt: a ShareGPT JSON file. text: lines of a text file, "
        "shuffled (sonnet). custom: JSON lines with prompt (or messages) and output_tokens. timed_trace: JSON lines with "
        "timestamp, input_length, output_length and hash_ids (Mooncake)",
        choices=DATASETS,
    )
    dataset_path: str = option("", "file of the dataset")
    num_prompts: int = option(1000, "requests to send", low=1, high=10**7)
    input_len: int = option(
        0, "tokens of a prompt's own part; 0: 1024 (random), 256 (prefix_repetition), 512 (text)", low=0, high=2**20
    )
    output_len: int = option(
        0, "tokens to generate; 0: what the dataset says, else 128 (256 for custom)", low=0, high=2**20
    )
    range_ratio: float = option(
        0.0, "random: lengths are uniform in length * (1 - this) to length * (1 + this)", low=0.0, high=0.999
    )
    prefix_len: int = option(
        -1,
        "tokens that prompts share, on top of input_len; -1: 0 (random), 256 (prefix_repetition), 128 (text)",
        low=-1,
        high=2**20,
    )
    num_prefixes: int = option(10, "prefix_repetition: different prefixes", low=1, high=10**6)
    profile: str = option("sharegpt", "synthetic: whose mean lengths", choices=("sharegpt", "alpaca"))
    oversample: bool = option(True, "repeat a file that has fewer requests than num_prompts")
    shuffle: bool = option(True, "take a file's requests in random order (a trace keeps its own)")
    trace_block_size: int = option(512, "timed_trace: tokens that one hash id stands for", low=1, high=2**20)
    trace_sec_multiplier: float = option(0.001, "timed_trace: seconds in one unit of timestamp", low=1e-9, high=1e9)
    seed: int = option(0, "of prompts, lengths, order and arrivals", low=0, high=2**63 - 1)
