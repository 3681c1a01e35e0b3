"""Pages to the host and back: in place, and only those named."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.pages import check
from pagedjax.runner.state import init_state
from pagedjax.runner.swap import SWAP_WIDTH, look_ahead, swap_in, swap_out
from pagedjax.runner.swap_pool import SwapPool
from tests.models.harness import tiny_spec


def make_state(dtype="float32", num_pages=40):
    return init_state(
        tiny_spec(num_layers=2),
        num_pages=num_pages,
        page_size=4,
        max_rows=3,
        max_len=64,
        cache_dtype=jnp.dtype(dtype),
        secret=(1, 2),
    )


jitted_in = jax.jit(swap_in)


def scalar(x):
    return jnp.int32(x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_round_trip_touches_nothing_else(dtype):
    state = make_state(dtype)
    rng = np.random.default_rng(0)
    noise = lambda x: jnp.asarray(rng.integers(-100, 100, x.shape).astype(x.dtype))  # noqa: E731
    state = state.replace(cache=jax.tree.map(noise, state.cache))
    before = jax.device_get(state.cache)
    index = jnp.arange(SWAP_WIDTH, dtype=jnp.int32)
    blocks, generations = swap_out(state, scalar(3), index + 7)
    np.testing.assert_array_equal(generations, state.pages.generation[7 : 7 + SWAP_WIDTH])
    for leaf, block in zip(jax.tree.leaves(before), jax.tree.leaves(blocks), strict=True):
        np.testing.assert_array_equal(np.moveaxis(np.asarray(block), 0, 1), leaf[:, 7 : 7 + SWAP_WIDTH])

    pool = SwapPool(state.cache, 9)
    held = [pool.take() for _ in range(5)]
    pool.write(held, jax.device_get(blocks))
    for start in (0, 2):  # the second time into pages that the row has, and one more
        part = held[start:] if start else held[:4]
        back = pool.read(part, SWAP_WIDTH)
        state, (ok, unowned) = jitted_in(state, scalar(1), scalar(start), back, scalar(len(part)), scalar(18))
        assert bool(ok)
    assert int(unowned) == 39 - 5
    pages = np.asarray(state.pages.table[0, 1, :5])
    assert (state.pages.num_pages.tolist(), int(state.rows.num_computed[1])) == ([0, 5, 0], 18)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(jax.device_get(state.cache)), strict=True):
        expected = old.copy()
        expected[:, pages] = old[:, 7:12]
        np.testing.assert_array_equal(new, expected)
    again, _ = swap_out(state, scalar(1), index)  # by logical page; beyond the row's end, the null page
    for block, second in zip(jax.tree.leaves(blocks), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(np.asarray(block)[:5], np.asarray(second)[:5])
    assert check(state.pages) == []


def test_without_room_nothing_changes():
    state = make_state(num_pages=4)
    blocks = jax.tree.map(jnp.ones_like, swap_out(state, scalar(3), jnp.zeros(SWAP_WIDTH, jnp.int32))[0])
    after, (ok, unowned) = jitted_in(state, scalar(0), scalar(0), blocks, scalar(4), scalar(16))
    assert not bool(ok)
    assert int(unowned) == 3
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after), jax.device_get(state))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_no_copy_of_the_pool(dtype):
    state = jax.eval_shape(functools.partial(make_state, dtype, num_pages=100_000))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    number, index = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((SWAP_WIDTH,), jnp.int32)
    blocks, _ = jax.eval_shape(swap_out, state, number, index)
    lowered = jax.jit(swap_in, donate_argnums=0).lower(state, number, number, blocks, number, number)
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= size * 0.99
    assert memory.temp_size_in_bytes < size / 100
    for program, args in ((swap_out, (number, index)), (look_ahead, ())):
        memory = jax.jit(program).lower(state, *args).compile().memory_analysis()
        assert memory.temp_size_in_bytes + memory.output_size_in_bytes < size / 100


def test_the_pool_hands_out_each_page_once():
    pool = SwapPool(make_state().cache, 4)
    pages = [pool.take() for _ in range(4)]
    assert sorted(pages) == [0, 1, 2, 3]
    assert (pool.num_free, pool.num_used) == (0, 4)
    pool.give(pages[2])
    assert pool.take() == pages[2]
    pool.use([1, 3])
    assert (pool.num_free, {pool.take(), pool.take()}) == (2, {0, 2})
    assert SwapPool(make_state().cache, 0).nbytes == 0
