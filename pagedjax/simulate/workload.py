"""What arrives: requests with lengths, contents and times. Plain NumPy."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from typing import Any

import numpy as np

from pagedjax.simulate.lengths import LENGTHS, LengthModel

_DTYPES: dict[str, Any] = {
    "arrival": np.float32,
    "prompt": np.int32,
    "output": np.int32,
    "prefix": np.int32,
    "prefix_tokens": np.int32,
    "stream": np.int32,
    "offset": np.int32,
    "priority": np.int32,
    "tenant": np.int32,
    "deadline": np.float32,
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """Q requests in order of arrival; every field is an array [Q].

    Token t of a request is token t of text `prefix` where t < prefix_tokens, else token offset + t of text `stream`.
    Requests with the same text there have the same tokens, which is all that a prefix cache sees. Generated tokens go on in
    the same stream, so that a later turn of a conversation finds them.
    """

    arrival: np.ndarray  # f32 seconds
    prompt: np.ndarray  # i32 tokens, at least 1, the shared prefix included
    output: np.ndarray  # i32 tokens that each continuation generates, at least 1
    prefix: np.ndarray = None  # type: ignore[assignment]  # i32 the shared prefix's name; default 0
    prefix_tokens: np.ndarray = None  # type: ignore[assignment]  # i32 its length; default 0
    stream: np.ndarray = None  # type: ignore[assignment]  # i32 the own text's name; default: the request's number
    offset: np.ndarray = None  # type: ignore[assignment]  # i32 where in it the prompt begins; default 0
    priority: np.ndarray = None  # type: ignore[assignment]  # i32, lower is more urgent; default 0
    tenant: np.ndarray = None  # type: ignore[assignment]  # i32 from 0 on; default 0
    deadline: np.ndarray = None  # type: ignore[assignment]  # f32 seconds after the arrival; default infinity

    def __post_init__(self) -> None:
        num = np.size(self.arrival)
        default = {"stream": np.arange(num), "deadline": np.full(num, np.inf)}
        for name, dtype in _DTYPES.items():
            value = getattr(self, name)
            value = np.asarray(default.get(name, np.zeros(num)) if value is None else value, dtype)
            if value.shape != (num,):
                raise ValueError(f"{name}: must have shape ({num},), got {value.shape}")
            object.__setattr__(self, name, value)
        if num == 0:
            raise ValueError("arrival: a workload has at least one request, got none")
        _check(np.isfinite(self.arrival) & (self.arrival >= 0), "arrival", self.arrival, "at least 0 and finite")
        _check(np.append(True, np.diff(self.arrival) >= 0), "arrival", self.arrival, "in ascending order")
        for name, low in (("prompt", 1), ("output", 1), ("prefix_tokens", 0), ("offset", 0), ("tenant", 0)):
            _check(getattr(self, name) >= low, name, getattr(self, name), f"at least {low}")
        _check(self.prefix_tokens <= self.prompt, "prefix_tokens", self.prefix_tokens, "at most the prompt's")

    @property
    def num_requests(self) -> int:
        """Q."""
        return self.arrival.size

    @property
    def max_total(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return int((self.prompt.astype(np.int64) + self.output).max())

    def at_rate(self, rate: float) -> Workload:
        """The same requests at another mean rate, in requests a second: their times are stretched."""
        if not rate > 0:
            raise ValueError(f"rate: must be above 0, got {rate}")
        mean = (self.num_requests - 1) / max(float(self.arrival[-1] - self.arrival[0]), 1e-9)
        return dataclasses.replace(self, arrival=(self.arrival.astype(np.float64) * mean / rate).astype(np.float32))


def _check(good: np.ndarray, name: str, value: np.ndarray, what: str) -> None:
    if not good.all():
        i = int(np.argmin(good))
        raise ValueError(f"{name}: must be {what}, got {value[i]} for request {i}")


def arrivals(num: int, rate: float, rng: np.random.Generator, cv: float = 1.0) -> np.ndarray:
    """Arrival times f32[num] with gamma-distributed gaps.

    Args:
      rate: requests a second, on average.
      cv: the gaps' coefficient of variation. 1 is a Poisson process, more is bursty, 0 evenly spaced.
    """
    if not rate > 0:
        raise ValueError(f"rate: must be above 0, got {rate}")
    if cv < 0:
        raise ValueError(f"cv: must be at least 0, got {cv}")
    gaps = rng.gamma(1 / cv**2, cv**2 / rate, num) if cv > 0 else np.full(num, 1 / rate)
    return np.cumsum(gaps).astype(np.float32)


def lengths_named(lengths: str | LengthModel) -> LengthModel:
    """A length model, or the one of that name in LENGTHS."""
    if isinstance(lengths, LengthModel):
        return lengths
    if lengths not in LENGTHS:
        raise ValueError(f"lengths: must be one of {', '.join(LENGTHS)}, got {lengths!r}")
    return LENGTHS[lengths]


def independent(
    num: int,
    rate: float,
    lengths: str | LengthModel = "sharegpt",
    *,
    seed: int = 0,
    cv: float = 1.0,
    prefix_tokens: int = 0,
    num_prefixes: int = 1,
    num_tenants: int = 1,
) -> Workload:
    """Requests that have nothing to do with one another, but that each may begin with one of a few shared prefixes.

    Args:
      num: Q.
      rate: requests a second.
      lengths: "sharegpt", "alpaca", or a model of one's own.
      seed: of lengths and times.
      cv: see `arrivals`.
      prefix_tokens: of the shared prefix, put before each prompt (80 and 341 in the paper's figure 16).
      num_prefixes: different prefixes, each request takes one at random.
      num_tenants: tenants, each request is of one at random.
    """
    rng = np.random.default_rng(seed)
    prompt, output = lengths_named(lengths).sample(num, rng)
    return Workload(
        arrival=arrivals(num, rate, rng, cv),
        prompt=prompt + prefix_tokens,
        output=output,
        prefix=rng.integers(0, num_prefixes, num),
        prefix_tokens=np.full(num, prefix_tokens),
        tenant=rng.integers(0, num_tenants, num),
    )


def conversations(
    num: int,
    rate: float,
    lengths: str | LengthModel = "sharegpt",
    *,
    seed: int = 0,
    cv: float = 1.0,
    new: float = 0.1,
    max_prompt: int = 1024,
    max_output: int = 1024,
) -> Workload:
    """A chatbot's requests (Kwon et al. 2023, section 6.4): a prompt is all of the conversation so far and a new question.

    Each request begins a conversation with probability `new` (0.1 in the authors' artifact), or else continues one at random.
    A prompt is cut to its last max_prompt tokens, an output is at most max_output tokens. Times do not depend on how
    fast the answers come.
    """
    rng = np.random.default_rng(seed)
    question, answer = lengths_named(lengths).sample(num, rng)
    answer = np.minimum(answer, max_output)
    so_far: list[int] = []
    stream, prompt, offset = np.zeros(num, np.int32), np.zeros(num, np.int32), np.zeros(num, np.int32)
    for i in range(num):
        if not so_far or rng.random() < new:
            so_far.append(0)
            stream[i] = len(so_far) - 1
        else:
            stream[i] = rng.integers(len(so_far))
        whole = so_far[stream[i]] + int(question[i])
        prompt[i] = min(whole, max_prompt)
        offset[i] = whole - prompt[i]
        so_far[stream[i]] = whole + int(answer[i])
    return Workload(arrival=arrivals(num, rate, rng, cv), prompt=prompt, output=answer, stream=stream, offset=offset)


MAX_ARRIVAL = 1e9
"""Seconds of a trace: some thirty years."""


def read_trace(path: str | pathlib.Path) -> Workload:
    """A JSONL file, one request a line: {"arrival": seconds, "prompt": tokens, "output": tokens, ...}, in any order.

    The other fields are those of Workload. Fields that no line has take their defaults.

    Raises:
      ValueError: a line that is not such an object, with its number; a value out of range.
    """
    rows = []
    for number, line in enumerate(pathlib.Path(path).read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as e:
            raise ValueError(f"{path}:{number}: not JSON: {e}") from None
        missing = [name for name in ("arrival", "prompt", "output") if not isinstance(row, dict) or name not in row]
        if missing:
            raise ValueError(f"{path}:{number}: lacks {', '.join(missing)}")
        unknown = [name for name in row if name not in _DTYPES]
        if unknown:
            raise ValueError(f"{path}:{number}: unknown field {unknown[0]!r}; there are {', '.join(_DTYPES)}")
        bad = [name for name, value in row.items() if isinstance(value, bool) or not isinstance(value, (int, float))]
        if bad:
            raise ValueError(f"{path}:{number}: {bad[0]}: must be a number, got {row[bad[0]]!r}")
        broken = [name for name in ("prompt", "output") if not math.isfinite(row[name]) or row[name] % 1]
        if broken:
            raise ValueError(f"{path}:{number}: {broken[0]}: must be a whole number of tokens, got {row[broken[0]]!r}")
        if not 0 <= row["arrival"] <= MAX_ARRIVAL:
            raise ValueError(
                f"{path}:{number}: arrival: must be in [0, {MAX_ARRIVAL:g}] seconds, got {row['arrival']!r}"
            )
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: no requests")
    rows.sort(key=lambda row: row["arrival"])
    default = {"stream": None, "deadline": np.inf}
    given = {name for row in rows for name in row}
    columns = {
        name: [row.get(name, i if name == "stream" else default.get(name, 0)) for i, row in enumerate(rows)]
        for name in _DTYPES
        if name in given
    }
    return Workload(**{name: np.asarray(values) for name, values in columns.items()})
