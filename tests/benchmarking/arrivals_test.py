"""When requests are sent: rates, spread, ramps."""

import math

import numpy as np
import pytest

from pagedjax.benchmarking import arrivals

MANY = 20_000


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("rate", [0.5, 100.0])
def test_gaps_have_the_mean_and_the_spread_asked_for(rate, burstiness):
    times = arrivals.arrival_times(MANY, rate, burstiness, seed=3)
    gaps = np.diff(times, prepend=0.0)
    assert (gaps >= 0).all()
    assert times[-1] == pytest.approx(MANY / rate)  # the run's rate is exact
    variation = gaps.std() / gaps.mean()
    # The coefficient of variation of a gamma distribution with shape b is b ** -0.5. Its estimate is off by a few percent.
    assert variation == pytest.approx(burstiness**-0.5, rel=0.04)
    # Gaps are independent of one another.
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 4 / math.sqrt(MANY)


def test_a_poisson_process_counts_like_one():
    """Numbers of arrivals in a second: variance as large as the mean."""
    times = arrivals.arrival_times(MANY, 8.0, 1.0, seed=1)
    counts = np.bincount(times.astype(int), minlength=int(MANY / 8))[: int(MANY / 8)]
    assert counts.mean() == pytest.approx(8.0, rel=0.01)
    assert counts.var() == pytest.approx(8.0, rel=0.1)


def test_seeds_and_no_rate():
    first, again, other = (arrivals.arrival_times(50, 2.0, 1.0, seed) for seed in (5, 5, 6))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert arrivals.arrival_times(3, math.inf, 1.0, 0).tolist() == [0.0, 0.0, 0.0]


def test_ramps():
    assert arrivals.ramp_rates(5, 1.0, 9.0, "linear").tolist() == [1.0, 3.0, 5.0, 7.0, 9.0]
    np.testing.assert_allclose(arrivals.ramp_rates(5, 1.0, 16.0, "exponential"), [1, 2, 4, 8, 16])
    rates = arrivals.ramp_rates(MANY, 1.0, 9.0, "linear")
    gaps = np.diff(arrivals.ramped_times(rates, 1.0, seed=0), prepend=0.0)
    for part in np.split(np.arange(MANY), 8):
        assert gaps[part].mean() == pytest.approx(np.mean(1 / rates[part]), rel=0.1)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: arrivals.arrival_times(0, 1.0, 1.0, 0), "num"),
        (lambda: arrivals.arrival_times(1, 0.0, 1.0, 0), "rate"),
        (lambda: arrivals.arrival_times(1, 1.0, 0.0, 0), "burstiness"),
        (lambda: arrivals.ramp_rates(3, 0.0, 1.0, "linear"), "start"),
        (lambda: arrivals.ramp_rates(3, 1.0, math.inf, "linear"), "end"),
        (lambda: arrivals.ramp_rates(3, 1.0, 2.0, "steep"), "strategy"),
    ],
)
def test_errors_name_the_argument(call, name):
    with pytest.raises(ValueError, match=name):
        call()
