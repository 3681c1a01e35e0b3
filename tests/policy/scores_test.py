"""The same functions on numbers, numpy arrays and inside jit."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.config import SchedulerConfig
from pagedjax.errors import ConfigError
from pagedjax.options import options
from pagedjax.policy import (
    AGING_TOKENS,
    POLICIES,
    Features,
    by_priority,
    earliest_deadline,
    fair_share,
    first_come,
    policy_named,
    shortest_prefix,
)

FLOATS = ("service", "waited", "time_left")


def features(**columns):
    """Columns that are not given are zero; the others have one length."""
    (size,) = {len(column) for column in columns.values()}
    return Features(
        **{
            name: np.asarray(columns.get(name, [0] * size), np.float32 if name in FLOATS else np.int32)
            for name in Features._fields
        }
    )


def order(policy, of):
    """Positions, first served first; the sort is stable, so that of equal ones the earlier in the queue is first."""
    return np.argsort(policy(of), kind="stable").tolist()


def test_first_come():
    assert order(first_come, features(arrival=[3, 1, 2], priority=[0, 9, 0])) == [1, 2, 0]


def test_priority():
    queue = features(arrival=[0, 1, 2, 3], priority=[5, -1, 5, -1])
    assert order(by_priority, queue) == [1, 3, 0, 2]
    assert int(np.lexsort((queue.arrival, by_priority(queue)))[-1]) == 2  # the least urgent, youngest yields


def test_shortest_prefix_counts_what_is_left_and_ages():
    known = features(num_tokens=[90, 40, 95], num_computed=[0, 0, 85], num_cached=[80, 0, 0])
    assert shortest_prefix(known).tolist() == [10, 40, 10]
    r = 5 * AGING_TOKENS  # a long one, then short ones: it is overtaken by four of them
    queue = features(arrival=range(8), num_tokens=[r] + [1] * 7)
    assert order(shortest_prefix, queue).index(0) == 4 < r / AGING_TOKENS


def test_fair_share_and_deadlines():
    assert order(fair_share, features(service=[7, 0, 3])) == [1, 2, 0]
    assert order(earliest_deadline, features(time_left=[np.inf, 3.5, np.inf, -1])) == [3, 1, 0, 2]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_host_and_device_agree(policy):
    queue = features(
        arrival=[3, 1, 2],
        priority=[7, -2, 0],
        num_tokens=[100, 2000, 7],
        num_computed=[0, 16, 6],
        num_cached=[48, 0, 0],
        max_tokens=[200, 2100, 9],
        service=[0.5, 3, 0],
        waited=[9, 8, 7.5],
        time_left=[np.inf, 2.5, -1],
    )
    on_host = policy(queue)
    on_device = jax.jit(policy)(Features(*map(jnp.asarray, queue)))
    assert on_host.dtype == on_device.dtype == np.float32
    assert np.array_equal(on_host, on_device)
    for i, score in enumerate(on_host):
        assert policy(Features(*(x[i].item() for x in queue))) == score
    many = jax.vmap(policy)(Features(*(jnp.stack([jnp.asarray(x)] * 2) for x in queue)))
    assert np.array_equal(many[1], on_host)


def test_policies_are_small_and_named_where_they_are_configured():
    help_text = dict(options(SchedulerConfig()))["policy"].field.metadata["help"]
    for name, policy in POLICIES.items():
        assert name in help_text
        assert policy_named(name) is policy
        assert len(inspect.getsource(policy).splitlines()) < 50
    with pytest.raises(ConfigError, match=r"config\.scheduler\.policy: must be one of first_come, .*got 'lifo'"):
        policy_named("lifo")
