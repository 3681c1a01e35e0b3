"""When requests are sent: open-loop arrivals, as offsets from the start."""

from __future__ import annotations

import math

import numpy as np

RAMPS = ("linear", "exponential")


def arrival_times(num: int, rate: float, burstiness: float, seed: int) -> np.ndarray:
    """Offsets of `num` requests from a gamma renewal process, scaled so that the last comes after num / rate seconds.

    Gaps are gamma-distributed with shape `burstiness` and mean 1 / rate, so their coefficient of variation is
    burstiness ** -0.5: 1 is a Poisson process, less is burstier, more is more even. The scaling makes the rate of one run
    the one that was asked for (given its end, a Poisson process stays one).

    Args:
      num: at least 1.
      rate: requests per second, above 0; infinite: all at once.
      burstiness: above 0.

    Returns:
      f64[num] seconds, ascending.

    Raises:
      ValueError: an argument out of range.
    """
    _check(num, rate, burstiness)
    if math.isinf(rate):
        return np.zeros(num)
    times = np.cumsum(np.random.default_rng([seed, 1]).gamma(burstiness, 1 / (rate * burstiness), num))
    return times * (num / rate / times[-1]) if times[-1] > 0 else times


def ramp_rates(num: int, start: float, end: float, strategy: str) -> np.ndarray:
    """The rate at which each request follows the one before: from `start` on to `end`, by equal steps or factors.

    Returns:
      f64[num] requests per second.
    """
    if strategy not in RAMPS:
        raise ValueError(f"strategy: must be one of {', '.join(RAMPS)}, got {strategy!r}")
    for name, value in (("start", start), ("end", end)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name}: must be a finite rate above 0, got {value}")
    progress = np.arange(num) / max(num - 1, 1)
    if strategy == "linear":
        return start + (end - start) * progress
    return start * (end / start) ** progress


def ramped_times(rates: np.ndarray, burstiness: float, seed: int) -> np.ndarray:
    """Offsets of requests that follow one another at the given rates, with gamma gaps as in `arrival_times`."""
    _check(len(rates), float(rates.min()), burstiness)
    gaps = np.random.default_rng([seed, 1]).gamma(burstiness, 1 / burstiness, len(rates)) / rates
    return np.cumsum(gaps)


def _check(num: int, rate: float, burstiness: float) -> None:
    if num < 1:
        raise ValueError(f"num: must be at least 1, got {num}")
    if not rate > 0:
        raise ValueError(f"rate: must be above 0, got {rate}")
    if not 0 < burstiness < math.inf:
        raise ValueError(f"burstiness: must be above 0 and finite, got {burstiness}")
