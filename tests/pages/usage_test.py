"""Sharing and waste: worked examples, and random states against slots counted one by one."""

import random

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedjax.pages import owned_shares, pool_shares, sharing_ratio, stats, usage
from tests.oracles.usage_oracle import slow_usage
from tests.pages.small import R, S, alloc, pad, pages_in_order, pin, remap
from tests.pages.world import OPERATIONS, World, ints, jitted, step

BOTH = jax.jit(lambda pages, computed, limits: (stats(pages), usage(pages, computed, limits)))


def both(pages, computed, limits):
    """(PageStats, Usage) as Python integers."""
    return jax.tree.map(int, jax.device_get(BOTH(pages, ints(computed), ints(limits))))


def test_forks_save_their_prompt():
    """Three rows over a prompt of nine tokens: nine entries name three pages; the third page holds one token."""
    pages, _ = alloc(pages_in_order(), [0], [3])
    pages, _ = remap(pages, [1, 2], [0, 0])
    states, counts = both(pages, pad([9, 9, 9]), pad([20, 11, 11]))
    assert counts == (9, 3, 9, 3, 0)
    assert sharing_ratio(counts) == 6 / 9
    assert owned_shares(counts) == {"tokens": 9 / 12, "reserved": 3 / 12, "internal": 0.0}
    shares = pool_shares(states, counts, S)
    assert shares["tokens"] == 9 / (16 * S)
    assert shares["external"] == 1 / 16
    assert shares["free"] == 12 / 16


def test_what_no_row_can_fill_is_internal():
    """A row that ends at ten tokens never fills the last two slots of its third page."""
    pages, _ = alloc(pages_in_order(), [0, 3], [3, 1])
    _, counts = both(pages, pad([9, 0, 0, 4]), pad([10, 0, 0, 4]))
    assert counts == (4, 4, 13, 1, 2)


def test_nothing_owned_and_pages_in_flight():
    pages = pin(pages_in_order(), [5, 6])
    states, counts = both(pages, [99] * R, [99] * R)  # lengths of rows that hold nothing do not matter
    assert counts == (0, 0, 0, 0, 0)
    assert sharing_ratio(counts) == 0
    assert set(owned_shares(counts).values()) == {0}
    shares = pool_shares(states, counts, S)
    assert (shares["pending"], shares["free"], shares["external"]) == (2 / 16, 13 / 16, 1 / 16)


def check_state(world, rng):
    """The device's counts are those of the slow way, and the shares of them add up."""
    host = jax.device_get(world.pages)
    computed = [rng.randint(0, len(t)) if rng.random() < 0.2 else len(t) for t in world.tokens]
    limits = [n + rng.choice((0, 0, 1, rng.randint(0, 3 * world.S))) for n in computed]
    states, counts = both(world.pages, computed, limits)
    assert counts == slow_usage(np.asarray(host.table), world.S, computed, limits)
    assert counts.tokens + counts.reserved + counts.internal == counts.distinct * world.S
    assert counts.distinct == states.active + states.shared
    assert 0 <= sharing_ratio(counts) < 1
    for shares, total in ((owned_shares(counts), int(counts.distinct > 0)), (pool_shares(states, counts, world.S), 1)):
        assert all(0 <= share <= 1 for share in shares.values())
        assert sum(shares.values()) == pytest.approx(total)
    return counts


@pytest.mark.parametrize("geometry", ["collisions", "groups"])
def test_random_states_agree_with_the_slow_way(geometry):
    rng = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")
    world, seen = World(geometry, jitted), []
    for _ in range(400):
        step(world, rng, rng.choice(OPERATIONS))
        seen.append(check_state(world, rng))
    assert max(sharing_ratio(counts) for counts in seen) > 0.2
    assert any(counts.reserved for counts in seen)
    assert any(counts.internal for counts in seen)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(kinds=st.lists(st.sampled_from(OPERATIONS), max_size=20), rng=st.randoms(use_true_random=False))
def test_the_shares_add_up(kinds, rng):
    world = World("collisions", jitted)
    for kind in kinds:
        step(world, rng, kind)
    check_state(world, rng)
