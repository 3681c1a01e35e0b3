"""The sizes that programs are compiled for."""

from __future__ import annotations

import pytest

from pagedjax.config import RunnerConfig, SchedulerConfig
from pagedjax.errors import ConfigError
from pagedjax.runner import make_buckets


@pytest.mark.parametrize("seqs", [1, 8, 9, 64, 100])
@pytest.mark.parametrize("tokens", [100, 128, 512, 2048])
def test_every_step_that_the_scheduler_may_plan_has_a_size(seqs, tokens):
    buckets = make_buckets(RunnerConfig(), SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens))
    for lanes in range(1, seqs + 1):
        assert lanes <= buckets.for_lanes(lanes) <= max(8, 4 * lanes)
        for total in {lanes, min(lanes + 1, tokens), tokens}:
            t, b = buckets.for_tokens(total, lanes)
            assert total <= t
            assert lanes <= b


def test_sizes_that_do_not_fit_are_named():
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens.*at least scheduler.max_num_seqs = 64"):
        make_buckets(RunnerConfig(), SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=32))
    with pytest.raises(ConfigError, match=r"runner.lane_buckets.*at least scheduler.max_num_seqs = 64, got 8"):
        make_buckets(RunnerConfig(lane_buckets=(8,)), SchedulerConfig(max_num_seqs=64))
    with pytest.raises(ConfigError, match=r"runner.token_buckets.*must rise"):
        make_buckets(RunnerConfig(token_buckets=(512, 64)), SchedulerConfig())
