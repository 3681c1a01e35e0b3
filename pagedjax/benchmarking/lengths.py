"""Lengths of prompts and outputs: around a number, or around the published means of a dataset."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass(frozen=True)
class LengthProfile:
    """Lengths in tokens: log-normal, rounded, and cut to [low, high], with given means.

    The means are published (Kwon et al., SOSP 2023, figure 11); that the distribution is log-normal, its width and its
    bounds are ours: the figure's histograms have no printed values.
    """

    prompt_mean: float
    output_mean: float
    sigma: float
    low: int
    high: int


PROFILES = {
    "sharegpt": LengthProfile(prompt_mean=161.31, output_mean=337.99, sigma=1.2, low=4, high=1024),
    "alpaca": LengthProfile(prompt_mean=19.31, output_mean=58.45, sigma=0.8, low=4, high=1024),
}
_GRID = 20_000


def around(length: int, range_ratio: float, num: int, rng: np.random.Generator) -> np.ndarray:
    """i64[num] uniform in length * (1 - range_ratio) to length * (1 + range_ratio), rounded outwards, at least 1."""
    low = max(1, math.floor(length * (1 - range_ratio)))
    return rng.integers(low, math.ceil(length * (1 + range_ratio)), num, endpoint=True)


def draw(profile: LengthProfile, num: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Prompt and output lengths, i64[num] each, independent of one another."""
    lengths = [
        _lengths(profile, _fit(profile, m), rng.normal(size=num)) for m in (profile.prompt_mean, profile.output_mean)
    ]
    return lengths[0], lengths[1]


def _lengths(profile: LengthProfile, mu: float, z: np.ndarray) -> np.ndarray:
    """Lengths of standard normal values."""
    return np.clip(np.rint(np.exp(mu + profile.sigma * z)), profile.low, profile.high).astype(np.int64)


def _fit(profile: LengthProfile, mean: float) -> float:
    """mu such that rounded and cut lengths have this mean, over a grid of quantiles."""
    quantile: Callable[[float], float] = statistics.NormalDist().inv_cdf
    z = np.array([quantile((i + 0.5) / _GRID) for i in range(_GRID)])
    low, high = 0.0, math.log(profile.high) + 3 * profile.sigma
    for _ in range(60):
        middle = (low + high) / 2
        if _lengths(profile, middle, z).mean() < mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2
