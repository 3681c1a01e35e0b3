"""Datasets in files: ShareGPT's JSON, JSON lines, plain text, timed traces."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from tqdm import tqdm

from pagedjax.benchmarking.prompts import PromptMaker, Tokenizer
from pagedjax.benchmarking.workload import BenchRequest, DatasetOptions
from pagedjax.errors import ConfigError

T = TypeVar("T")
# The filter that published results on ShareGPT use.
_MIN_TOKENS, _MAX_PROMPT, _MAX_TOTAL = 4, 1024, 2048
_CUSTOM_OUTPUT_LEN, _TEXT_OUTPUT_LEN = 256, 128
_SHOW_AFTER_SECONDS = 2.0


def read_sharegpt(given: DatasetOptions, tokenizer: Tokenizer) -> list[BenchRequest]:
    """First turn as prompt, length of the second as output length.

    Kept are pairs with at least 4 tokens on each side, at most 1,024 in the prompt and 2,048 in both.
    """
    path = given.dataset_path
    entries = _json(path)
    if not isinstance(entries, list):
        raise ConfigError(f"--dataset_path={path}: must be a JSON list of conversations")
    pairs = [(turns[0]["value"], turns[1]["value"]) for e in entries if len(turns := _turns(e)) >= 2]
    out: list[BenchRequest] = []
    for i in tqdm(_order(given, len(pairs)), desc="Tokenizing", unit=" pairs", delay=_SHOW_AFTER_SECONDS, leave=False):
        prompt, answer = pairs[i]
        prompt_len = tokenizer.count(prompt)
        output_len = given.output_len or tokenizer.count(answer, special=False)
        fits = prompt_len <= _MAX_PROMPT and prompt_len + output_len <= _MAX_TOTAL
        if prompt_len >= _MIN_TOKENS and (given.output_len or output_len >= _MIN_TOKENS) and fits:
            out.append(BenchRequest(prompt, prompt_len, output_len))
        if len(out) == given.num_prompts:
            break
    return _enough(given, out)


def _turns(entry: Any) -> list[dict[str, str]]:
    turns = entry.get("conversations", entry.get("conversation")) if isinstance(entry, dict) else None
    valid = isinstance(turns, list) and all(isinstance(t, dict) and isinstance(t.get("value"), str) for t in turns)
    return turns if valid else []  # type: ignore[return-value]


def read_custom(given: DatasetOptions, tokenizer: Tokenizer) -> list[BenchRequest]:
    """JSON lines with `prompt` (text or token ids) or `messages`, and maybe `output_tokens`."""
    lines = list(_json_lines(given.dataset_path))
    out = []
    for i in _order(given, len(lines))[: given.num_prompts]:
        number, entry = lines[i]
        where = f"--dataset_path={given.dataset_path}: line {number}"
        output_len = given.output_len or _count_of(entry, "output_tokens", where, _CUSTOM_OUTPUT_LEN)
        prompt, messages = entry.get("prompt"), entry.get("messages")
        if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
            text = "\n".join(str(m.get("content", "")) for m in messages)
            out.append(BenchRequest(text, tokenizer.count(text, special=False), output_len, messages=tuple(messages)))
        elif isinstance(prompt, str) and prompt:
            out.append(BenchRequest(prompt, tokenizer.count(prompt), output_len))
        elif isinstance(prompt, list) and prompt and all(isinstance(t, int) for t in prompt):
            out.append(BenchRequest(tuple(prompt), len(prompt), output_len))
        else:
            raise ConfigError(f"{where}: needs a prompt (a text or token ids) or messages")
    return _enough(given, out)


def read_text(given: DatasetOptions, maker: PromptMaker) -> list[BenchRequest]:
    """Prompts out of a text's lines: the first ones as a prefix that all share, then lines in random order."""
    lines = [line for line in _text(given.dataset_path).splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"--dataset_path={given.dataset_path}: has no text")
    total = given.prefix_len + given.input_len
    # A line has a token at least, so these are enough; the prefix is cut out of the text's beginning.
    head = _repeated(lines, given.prefix_len)
    out = []
    for i in range(given.num_prompts):
        order = np.random.default_rng([given.seed, 6, i]).permutation(len(lines))
        own = _repeated([lines[j] for j in order], given.input_len)
        prefix = maker.fit("\n".join(head), given.prefix_len) if given.prefix_len else None
        rest = maker.fit("\n".join(own), given.input_len)
        out.append(BenchRequest(_joined(maker, prefix, rest, total), total, given.output_len or _TEXT_OUTPUT_LEN))
    return out


def _joined(maker: PromptMaker, prefix: Any, rest: Any, total: int) -> str | tuple[int, ...]:
    if prefix is None or isinstance(prefix, tuple):
        return rest if prefix is None else (*prefix, *rest)
    return maker.fit(f"{prefix}\n{rest}", total)


def _repeated(lines: Sequence[str], num: int) -> list[str]:
    return [lines[i % len(lines)] for i in range(num)]


class TraceEntry(NamedTuple):
    """One request of a trace; arrival in seconds from the first."""

    arrival: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_trace(given: DatasetOptions) -> list[TraceEntry]:
    """The first num_prompts requests of a trace, by time, the first at 0."""
    out = []
    for number, entry in _json_lines(given.dataset_path):
        where = f"--dataset_path={given.dataset_path}: line {number}"
        stamp, ids = entry.get("timestamp"), entry.get("hash_ids", [])
        if isinstance(stamp, bool) or not isinstance(stamp, (int, float)):
            raise ConfigError(f"{where}: timestamp must be a number, got {stamp!r}")
        if not isinstance(ids, list) or not all(isinstance(i, int) and i >= 0 for i in ids):
            raise ConfigError(f"{where}: hash_ids must be a list of numbers of at least 0")
        num_in, num_out = (_count_of(entry, name, where) for name in ("input_length", "output_length"))
        out.append(TraceEntry(stamp * given.trace_sec_multiplier, num_in, num_out, tuple(ids)))
    if not out:
        raise ConfigError(f"--dataset_path={given.dataset_path}: has no request")
    out.sort(key=lambda entry: entry.arrival)
    return [entry._replace(arrival=entry.arrival - out[0].arrival) for entry in out[: given.num_prompts]]


def _count_of(entry: dict[str, Any], name: str, where: str, default: int | None = None) -> int:
    value = entry.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where}: {name} must be a whole number of at least 1, got {value!r}")
    return value


def _order(given: DatasetOptions, num: int) -> list[int]:
    return np.random.default_rng([given.seed, 7]).permutation(num).tolist() if given.shuffle else list(range(num))


def _enough(given: DatasetOptions, found: list[T]) -> list[T]:
    """As many as were asked for, repeated from the start where that is allowed."""
    if not found:
        raise ConfigError(f"--dataset_path={given.dataset_path}: no request in it can be used")
    if not given.oversample:
        return found
    return [found[i % len(found)] for i in range(given.num_prompts)]


def _json_lines(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"--dataset_path={path}: line {number} is not JSON: {error}") from None
        if not isinstance(entry, dict):
            raise ConfigError(f"--dataset_path={path}: line {number} must be an object, got {type(entry).__name__}")
        yield number, entry


def _json(path: str) -> Any:
    text = _text(path)
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--dataset_path={path}: is not JSON: {error}") from None


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--dataset_path={path}: cannot be read: {reason}") from None
