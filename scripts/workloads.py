"""The workloads of the benchmarks: greedy decoding, end-of-sequence ignored, prompts of random token ids of SmolLM2.

W1: 64 requests, 128 tokens in, 128 out. W2: one such request. W3: 32 requests that share 1,024 tokens and have 32 of their
own, 32 out. W4: 64 requests of mixed lengths, 16 to 256 in, log-normal (8 to 512) out.
"""

from __future__ import annotations

import dataclasses

import numpy as np

VOCAB_SIZE = 49_152


@dataclasses.dataclass(frozen=True)
class Work:
    """One request: prompt ids and the exact number of tokens to generate."""

    prompt_ids: tuple[int, ...]
    num_tokens: int


def _ids(rng: np.random.Generator, num: int) -> list[int]:
    return rng.integers(100, VOCAB_SIZE - 100, num).tolist()


def uniform(num_requests: int, seed: int) -> list[Work]:
    """Requests of 128 tokens in and 128 out."""
    rng = np.random.default_rng(seed)
    return [Work(tuple(_ids(rng, 128)), 128) for _ in range(num_requests)]


def shared_prefix() -> list[Work]:
    """32 requests with one prefix of 1,024 tokens."""
    rng = np.random.default_rng(3)
    shared = _ids(rng, 1024)
    return [Work((*shared, *_ids(rng, 32)), 32) for _ in range(32)]


def mixed() -> list[Work]:
    """64 requests of mixed lengths."""
    rng = np.random.default_rng(0)
    outputs = np.clip(rng.lognormal(np.log(100), 0.8, 64), 8, 512).astype(int)
    inputs = rng.integers(16, 257, 64)
    return [Work(tuple(_ids(rng, int(i))), int(o)) for i, o in zip(inputs, outputs, strict=True)]


def make(name: str) -> list[Work]:
    """The requests of workload `name`."""
    return {
        "w1": lambda: uniform(64, seed=0),
        "w2": lambda: uniform(1, seed=1),
        "w3": shared_prefix,
        "w4": mixed,
    }[name]()


NAMES = ("w1", "w2", "w3", "w4")
