"""What `Engine.stats` says while sequences run, against the host's own books and the page table slot by slot."""

from __future__ import annotations

import pytest

from pagedjax import Request
from tests.engine.tiny import assert_clean, make_engine, params, random_prompts
from tests.oracles.usage_oracle import slow_usage


def expected(engine):
    """Usage as the scheduler's sequences and the page table have it."""
    rows = engine.config.scheduler.max_num_seqs
    computed, limits = [0] * rows, [0] * rows
    for s in engine._scheduler.running:
        computed[s.row], limits[s.row] = s.num_computed, s.max_total - 1
    return slow_usage(engine.runner.page_table(), engine.runner.page_size, computed, limits)


def test_sharing_and_waste_are_seen_while_it_runs():
    engine = make_engine(runner__overlap=False)  # else the device is ahead of the host's books
    for i, (n, max_tokens) in enumerate([(3, 12), (1, 20), (2, 5)]):
        engine.add_request(Request(str(i), random_prompts(1, 19, 20, seed=i)[0], params(n=n, max_tokens=max_tokens)))
    ratios = []
    while engine.has_unfinished():
        engine.step()
        stats = engine.stats()
        mapped, distinct, tokens, reserved, internal = expected(engine)
        size, pool = engine.runner.page_size, stats.pages_total + 1
        assert distinct == stats.pages_active + stats.pages_shared
        assert stats.sharing_ratio == pytest.approx((mapped - distinct) / mapped if mapped else 0)
        parts = {"tokens": tokens, "reserved": reserved, "internal": internal}
        for name, slots in parts.items():
            assert stats.owned_shares[name] == pytest.approx(slots / (distinct * size) if distinct else 0)
            assert stats.pool_shares[name] == pytest.approx(slots / (pool * size))
        assert stats.pool_shares["external"] == pytest.approx(1 / pool)
        assert sum(stats.pool_shares.values()) == pytest.approx(1)
        ratios.append(stats.sharing_ratio)
    assert max(ratios) > 0.3
    assert stats.forks == 3
    assert stats.page_copies >= 3
    assert stats.requests_finished == {"length": 6}
    assert_clean(engine)


def test_a_statistic_is_of_its_moment():
    engine = make_engine()
    before = engine.stats()
    engine.add_request(Request("0", (9, 10), params(max_tokens=2)))
    while engine.has_unfinished():
        engine.step()
    assert (before.generation_tokens, before.requests_finished) == (0, {})
    assert (engine.stats().generation_tokens, engine.stats().requests_finished) == (2, {"length": 1})
