"""The same functions on numbers, numpy arrays and inside jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.policy import POLICIES, Features, by_priority, first_come


def features(arrival, priority):
    zeros = np.zeros(len(arrival), np.int32)
    return Features(np.asarray(arrival, np.int32), np.asarray(priority, np.int32), zeros, zeros)


def order(policy, of):
    """Positions, first served first; the sort is stable, so that of equal ones the earlier in the queue is first."""
    return np.argsort(policy(of), kind="stable").tolist()


def test_first_come():
    assert order(first_come, features([3, 1, 2], [0, 9, 0])) == [1, 2, 0]


def test_priority():
    queue = features([0, 1, 2, 3], [5, -1, 5, -1])
    assert order(by_priority, queue) == [1, 3, 0, 2]
    assert int(np.lexsort((queue.arrival, by_priority(queue)))[-1]) == 2  # the least urgent, youngest yields


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_host_and_device_agree(policy):
    queue = features([3, 1, 2], [7, -2, 0])
    on_host = policy(queue)
    on_device = jax.jit(policy)(Features(*map(jnp.asarray, queue)))
    assert on_host.dtype == on_device.dtype == np.float32
    assert np.array_equal(on_host, on_device)
    for i, score in enumerate(on_host):
        assert policy(Features(*(int(x[i]) for x in queue))) == score
    many = jax.vmap(policy)(Features(*(jnp.stack([jnp.asarray(x)] * 2) for x in queue)))
    assert np.array_equal(many[1], on_host)
