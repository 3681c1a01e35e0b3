"""What the paper states exactly, or what follows from its rules: OPT-13B in 12 GiB, requests that always wait."""

import pytest

from pagedjax.simulate import SimConfig, independent, sweep

SLOTS = 983 * 16


@pytest.fixture(scope="module")
def saturated():
    load = independent(160, 8.0, "sharegpt")
    names = ("orca_max", "orca_pow2", "orca_oracle", "paged")
    runs = [(SimConfig(scheme=name, max_running=48, horizon=60.0), load) for name in names]
    return dict(zip(names, sweep(runs, progress=False), strict=True))


def test_orca_max_runs_seven_requests(saturated):
    """Figure 13: 7.00. Figure 2: 8.9 % external."""
    result = saturated["orca_max"]
    assert result.mean_running(start=10.0) == pytest.approx(7.0, rel=1e-6)
    assert result.waste(start=10.0)["external"] == pytest.approx((SLOTS - 7 * 2048) / SLOTS, rel=1e-4)
    assert result.waste(start=10.0)["internal"] > 0.4


def test_the_order_of_figures_2_and_13(saturated):
    running = [saturated[name].mean_running(start=20.0) for name in ("orca_max", "orca_pow2", "orca_oracle", "paged")]
    assert running == sorted(running)
    assert running[3] > 2 * running[2]
    tokens = [saturated[name].waste(start=20.0)["tokens"] for name in ("orca_max", "orca_pow2", "orca_oracle", "paged")]
    assert tokens[0] < 0.3
    assert tokens[3] > 0.95  # 96.3 % in figure 2
    assert saturated["orca_oracle"].waste(start=20.0)["internal"] == pytest.approx(0.0, abs=1e-6)
    owned = saturated["paged"].owned_waste(start=20.0)
    assert owned["reserved"] + owned["internal"] < 0.04  # "under 4 %"


def test_parts_of_the_waste_add_up(saturated):
    for result in saturated.values():
        assert sum(result.waste().values()) == pytest.approx(1.0)
        assert min(result.waste().values()) > -1e-5
        series = result.series()
        assert series["time"].size == series["running"].size > 10


def test_jumps_leave_most_iterations_out(saturated):
    """The work goes by events: with requests that run for hundreds of steps, most steps are jumped over."""
    assert all(result.iterations > 2 * result.trips for name, result in saturated.items() if name != "paged")
    assert saturated["paged"].iterations > saturated["paged"].trips
