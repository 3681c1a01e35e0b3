"""The allocators that paging is compared with, against plain Python and against what the paper says of them."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.pages.baselines import (
    alloc_chunks,
    free_units,
    init_buddy,
    init_chunks,
    release_buddy,
    release_chunks,
    reservation,
    reserve,
)
from tests.oracles.baselines_oracle import BuddyOracle, ChunksOracle

R = 12
RESERVE = jax.jit(reserve, static_argnames="together")
RELEASE = jax.jit(release_buddy)
ALLOC_CHUNKS, RELEASE_CHUNKS = jax.jit(alloc_chunks), jax.jit(release_chunks)
LANES = 4


def ints(values):
    return jnp.asarray(values, jnp.int32)


def chunks_of(buddy):
    free = {(i, 2 ** (int(o) - 1)) for i, o in enumerate(buddy.free) if o}
    rows = {r: (int(s), 2 ** (int(o) - 1)) for r, (s, o) in enumerate(zip(buddy.start, buddy.order, strict=True)) if o}
    return free, rows


@pytest.mark.parametrize("num_units", [1, 37, 64, 101])
def test_buddy_agrees_with_plain_python(num_units):
    rng = random.Random(num_units)
    buddy, oracle = init_buddy(num_units=num_units, max_rows=R, max_order=4), BuddyOracle(num_units, 4)
    failed = served = 0
    for _ in range(150):
        if rng.random() < 0.55:
            together = rng.choice([1, 2])
            rows = rng.sample(range(R + 1), LANES)
            units = [rng.choice([1, 1, 2, 3, 4, 7, 16, 17, 0]) for _ in rows]
            lanes = [[(r, u) for r, u in zip(rows[i : i + together], units[i : i + together], strict=True) if r < R]
                     for i in range(0, LANES, together)]  # fmt: skip
            want = [ok for ok in oracle.reserve(lanes) for _ in range(together)]
            buddy, ok = RESERVE(buddy, ints(rows), ints(units), together=together)
            assert ok.tolist() == want
            failed, served = failed + want.count(False), served + want.count(True)
        else:
            rows = rng.sample(range(R + 1), LANES)
            want = sum(oracle.release(row) for row in rows)
            buddy, given = RELEASE(buddy, ints(rows))
            assert int(given) == want
        assert chunks_of(buddy) == (oracle.free, oracle.rows)
        assert int(free_units(buddy)) == sum(size for _, size in oracle.free)
        held = sorted((*oracle.free, *oracle.rows.values()))
        assert [at for at, _ in held] == list(np.cumsum([0, *(size for _, size in held)])[:-1])
    assert failed
    assert served
    buddy, _ = RELEASE(buddy, ints(range(R)))
    assert chunks_of(buddy)[0] == BuddyOracle(num_units, 4).free  # everything has grown together again


def test_chunks_agree_with_plain_python():
    rng = random.Random(0)
    chunks, oracle = init_chunks(num_chunks=20, max_rows=R, max_chunks_per_row=4), ChunksOracle(20, R, 4)
    failed = 0
    for _ in range(200):
        rows = rng.sample(range(R), LANES)
        if rng.random() < 0.6:
            need = [rng.choice([0, 1, 1, 2, 3, -1]) for _ in rows]
            chunks, ok = ALLOC_CHUNKS(chunks, ints(rows), ints(need))
            want = oracle.alloc(rows, need)
            assert ok.tolist() == want
            failed += not all(want)
        else:
            rows = rows[:2]
            chunks, given = RELEASE_CHUNKS(chunks, ints([*rows, R, R]))
            assert int(given) == oracle.release(rows)
        have = [row[:n].tolist() for row, n in zip(np.asarray(chunks.table), chunks.num_chunks, strict=True)]
        assert have == oracle.rows
        assert chunks.stack[: int(chunks.num_free)].tolist() == oracle.stack
    assert failed


def test_mapped_and_eager_verbs_agree_with_compiled_ones():
    rng = np.random.default_rng(0)
    rows, units = ints(rng.permutation(R)[None, :LANES].repeat(3, 0)), ints(rng.integers(1, 9, (3, LANES)))
    one = init_buddy(num_units=29, max_rows=R, max_order=3)
    stacked = jax.tree.map(lambda x: jnp.stack([x] * 3), one)
    mapped, ok = jax.vmap(reserve)(stacked, rows, units)
    mapped, _ = jax.vmap(release_buddy)(mapped, rows[:, :2])
    for lane in range(3):
        compiled, want = RESERVE(one, rows[lane], units[lane])
        compiled, _ = RELEASE(compiled, rows[lane, :2])
        with jax.disable_jit():
            eager, want_eager = reserve(one, rows[lane], units[lane])
            eager, _ = release_buddy(eager, rows[lane, :2])
        assert ok[lane].tolist() == want.tolist() == want_eager.tolist()
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x, i=lane: x[i], mapped), compiled)
        jax.tree.map(np.testing.assert_array_equal, eager, compiled)


def test_orca_max_in_12_gib():
    """OPT-13B, 983 units of 16 tokens: seven requests of 2,048, and 8.9 % that no request can have (Kwon et al., figure 2)."""
    buddy = init_buddy(num_units=983, max_rows=R)
    wanted = reservation("max", [100] * 8, [200] * 8, 2048)
    assert wanted.tolist() == [2048] * 8
    buddy, ok = RESERVE(buddy, ints(range(8)), ints(-(-wanted // 16)))
    assert ok.tolist() == [True] * 7 + [False]
    assert int(free_units(buddy)) == 87
    assert round(100 * 87 / 983, 1) == 8.9


def test_what_is_reserved():
    prompt, output = [10, 100, 2000, 5], [25, 32, 40, 1]
    assert reservation("oracle", prompt, output, 2048).tolist() == [35, 132, 2040, 6]
    assert reservation("pow2", prompt, output, 2048).tolist() == [42, 132, 2048, 6]
    assert reservation("max", prompt, output, 2048).tolist() == [2048] * 4
    with pytest.raises(ValueError, match="kind: must be one of max, pow2, oracle, got 'guess'"):
        reservation("guess", prompt, output, 2048)


@pytest.mark.parametrize(
    ("make", "sizes", "message"),
    [
        (init_buddy, dict(num_units=0, max_rows=1), r"num_units: must be in \[1, "),
        (init_buddy, dict(num_units=1, max_rows=1, max_order=21), r"max_order: must be in \[0, 20\], got 21"),
        (init_chunks, dict(num_chunks=1, max_rows=0, max_chunks_per_row=1), r"max_rows: must be in \[1, "),
    ],
)
def test_sizes_out_of_range(make, sizes, message):
    with pytest.raises(ValueError, match=message):
        make(**sizes)
