"""The shapes that programs are compiled for: a few sizes each, so that one request does not pay for sixty-four."""

from __future__ import annotations

import dataclasses

from pagedjax.config import RunnerConfig, SchedulerConfig
from pagedjax.errors import ConfigError

# Fewer than eight rows of bfloat16 fall off the fast matrix path of CPUs (20x), and gain nothing elsewhere.
MIN_LANES = 8
MIN_TOKENS = 64
GROWTH = 4


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Sizes in rising order; the last one is the most that fits in a dispatch.

    Attributes:
      lanes: numbers of lanes B of the decode loop.
      tokens: (T, B) of the mixed step.
    """

    lanes: tuple[int, ...]
    tokens: tuple[tuple[int, int], ...]

    def for_lanes(self, num_lanes: int) -> int:
        """The smallest B that holds `num_lanes`."""
        return next(b for b in self.lanes if b >= num_lanes)

    def for_tokens(self, num_tokens: int, num_lanes: int) -> tuple[int, int]:
        """The smallest (T, B) that holds both."""
        return next((t, b) for t, b in self.tokens if t >= num_tokens and b >= num_lanes)


def _ladder(low: int, high: int) -> tuple[int, ...]:
    sizes = []
    size = low
    while size < high:
        sizes.append(size)
        size *= GROWTH
    return (*sizes, high)


def make_buckets(runner: RunnerConfig, scheduler: SchedulerConfig) -> Buckets:
    """The configured sizes, or a ladder in steps of four: 8, 32, ... lanes and 64, 256, ... tokens."""
    if scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
        raise ConfigError(
            f"config.scheduler.max_num_batched_tokens: must be at least scheduler.max_num_seqs = {scheduler.max_num_seqs}, "
            f"a token for each sequence that decodes; got {scheduler.max_num_batched_tokens}"
        )
    lanes = runner.lane_buckets or _ladder(MIN_LANES, max(MIN_LANES, scheduler.max_num_seqs))
    tokens = runner.token_buckets or _ladder(MIN_TOKENS, max(MIN_TOKENS, scheduler.max_num_batched_tokens))
    _check("runner.lane_buckets", lanes, scheduler.max_num_seqs, "scheduler.max_num_seqs")
    _check("runner.token_buckets", tokens, scheduler.max_num_batched_tokens, "scheduler.max_num_batched_tokens")
    if len(lanes) == 1:
        return Buckets(lanes=lanes, tokens=tuple((t, lanes[0]) for t in tokens))
    # Few tokens mostly come with few lanes, many with many: the corners are left out, since a program takes seconds to
    # compile. What falls into one takes the next larger size. All lanes need at least as many tokens.
    small = [(t, lanes[0]) for t in (tokens[:-1] or tokens) if t >= lanes[0]]
    large = [(t, lanes[-1]) for t in (tokens[1:] or tokens) if t >= lanes[-1]]
    return Buckets(lanes=lanes, tokens=tuple(sorted({*small, *large})))


def _check(name: str, sizes: tuple[int, ...], largest: int, of: str) -> None:
    if list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
        raise ConfigError(f"config.{name}: sizes must rise and be at least 1, got {sizes}")
    if sizes[-1] < largest:
        raise ConfigError(f"config.{name}: the largest size must be at least {of} = {largest}, got {sizes[-1]}")
