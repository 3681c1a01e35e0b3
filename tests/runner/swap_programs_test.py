"""Pages to the host and back: in place, and only those named."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pagedjax_kernels import init_cache

from pagedjax.pages import alloc, check
from pagedjax.runner.state import init_state
from pagedjax.runner.swap import LOOKAHEAD, SWAP_WIDTH, look_ahead, swap_in, swap_out
from pagedjax.runner.swap_pool import SwapPool
from tests.models.harness import tiny_spec


def make_state(dtype="float32", num_pages=40, windows=()):
    return init_state(
        tiny_spec(num_layers=2, windows=windows),
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


def padded(*values):
    return jnp.asarray([*values, *[0] * (SWAP_WIDTH - len(values))], jnp.int32)


NO_GROUP = padded()


@pytest.mark.parametrize(
    ("dtype", "platform"), [("float32", "cpu"), ("bfloat16", "cpu"), ("int8", "cpu"), ("int8", "tpu")]
)
def test_round_trip_touches_nothing_else(dtype, platform):
    state = make_state(dtype)
    state = state.replace(cache=init_cache(2, 40, 4, 2, 16, dtype, platform=platform))
    rng = np.random.default_rng(0)
    noise = lambda x: jnp.asarray(rng.integers(-100, 100, x.shape).astype(x.dtype))  # noqa: E731
    state = state.replace(cache=jax.tree.map(noise, state.cache))
    before = jax.device_get(state.cache)
    index = jnp.arange(SWAP_WIDTH, dtype=jnp.int32)
    blocks, generations = swap_out(state, scalar(3), NO_GROUP, index + 7)
    np.testing.assert_array_equal(generations, state.pages.generation[7 : 7 + SWAP_WIDTH])
    for leaf, block in zip(jax.tree.leaves(before), jax.tree.leaves(blocks), strict=True):
        np.testing.assert_array_equal(np.moveaxis(np.asarray(block), 0, 1), leaf[:, 7 : 7 + SWAP_WIDTH])

    pool = SwapPool(state.cache, 9)
    held = [pool.take() for _ in range(5)]
    pool.write(held, jax.device_get(blocks))
    for start in (0, 2):  # the second time into pages that the row has, and one more
        part = held[start:] if start else held[:4]
        back = pool.read(part, SWAP_WIDTH)
        columns = padded(*range(start, start + len(part)))
        state, (ok, unowned) = jitted_in(state, scalar(1), NO_GROUP, columns, back, scalar(len(part)), scalar(18))
        assert bool(ok)
    assert int(unowned) == 39 - 5
    pages = np.asarray(state.pages.table[0, 1, :5])
    assert (state.pages.num_pages.tolist(), int(state.rows.num_computed[1])) == ([0, 5, 0], 18)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(jax.device_get(state.cache)), strict=True):
        expected = old.copy()
        expected[:, pages] = old[:, 7:12]
        np.testing.assert_array_equal(new, expected)
    again, generations = swap_out(state, scalar(1), NO_GROUP, index)  # by logical page; beyond the end, the null page
    np.testing.assert_array_equal(generations > 0, index < 5)
    for block, second in zip(jax.tree.leaves(blocks), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(np.asarray(block)[:5], np.asarray(second)[:5])
    assert check(state.pages) == []


def test_without_room_nothing_changes():
    state = make_state(num_pages=4)
    blocks = jax.tree.map(jnp.ones_like, swap_out(state, scalar(3), NO_GROUP, NO_GROUP)[0])
    columns = padded(0, 1, 2, 3)
    after, (ok, unowned) = jitted_in(state, scalar(0), NO_GROUP, columns, blocks, scalar(4), scalar(16))
    assert not bool(ok)
    assert int(unowned) == 3
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after), jax.device_get(state))


def test_windows_fill_only_what_is_seen():
    """Two groups, one with a window of 6 tokens: a row that has its first 8 tokens gets those up to 27."""
    state = make_state(windows=(6, 0))
    pages, _ = alloc(state.pages, jnp.asarray([1]), jnp.asarray([2]))
    mine = np.asarray(pages.table[:, 1, :2])
    state = state.replace(pages=pages)
    before = jax.device_get(state.cache)
    blocks, _ = swap_out(state, scalar(3), NO_GROUP, NO_GROUP)
    blocks = jax.tree.map(lambda x: 7 + jnp.arange(x.size).reshape(x.shape).astype(x.dtype), blocks)
    places = [(0, 2), (0, 3), (0, 4), (0, 5), (0, 6), (1, 5), (1, 6)]
    groups, columns = (padded(*values) for values in zip(*places, strict=True))
    fill = jax.jit(functools.partial(swap_in, windows=(0, 6)))
    after, (ok, unowned) = fill(state, scalar(1), groups, columns, blocks, scalar(7), scalar(27))
    assert bool(ok)
    table = np.asarray(after.pages.table)
    assert (table[0, 1] > 0).tolist() == [True] * 7 + [False] * 9
    assert np.flatnonzero(table[1, 1]).tolist() == [5, 6]  # token 27 sees 22 to 27
    assert table[0, 1, :2].tolist() == mine[0].tolist()
    assert int(unowned) == 39 - 9
    assert (after.pages.num_pages.tolist(), int(after.rows.num_computed[1])) == ([0, 7, 0], 27)
    assert check(after.pages, windows=(0, 6)) == []
    expected, found = before.kv_pages.copy(), np.asarray(after.cache.kv_pages)
    filled = [table[g, 1, c] for g, c in places]
    expected[:, filled] = np.moveaxis(np.asarray(blocks.kv_pages)[:7], 0, 1)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("windows", [(), (6, 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_no_copy_of_the_pool(dtype, windows):
    state = jax.eval_shape(functools.partial(make_state, dtype, num_pages=100_000, windows=windows))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    number, index = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((SWAP_WIDTH,), jnp.int32)
    blocks, _ = jax.eval_shape(swap_out, state, number, index, index)
    program = functools.partial(swap_in, windows=tiny_spec(num_layers=2, windows=windows).groups.windows)
    lowered = jax.jit(program, donate_argnums=0).lower(state, number, index, index, blocks, number, number)
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= size * 0.99
    assert memory.temp_size_in_bytes < size / 100
    for program, args in ((swap_out, (number, index, index)), (look_ahead, ())):
        memory = jax.jit(program).lower(state, *args).compile().memory_analysis()
        assert memory.temp_size_in_bytes + memory.output_size_in_bytes < size / 100


def test_the_look_ahead_grows_with_the_groups():
    """A dispatch recycles pages in every group; 100 free pages that are no news lie in front."""
    state = make_state(num_pages=400, windows=(6, 0))
    cached = jnp.arange(400) > 100
    state = state.replace(pages=state.pages.replace(parent=jnp.where(cached, 400, 0)))
    ids, _ = look_ahead(state)
    assert ids.tolist() == list(range(101, 101 + 2 * LOOKAHEAD))


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
