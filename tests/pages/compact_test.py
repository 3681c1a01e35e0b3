"""Compaction renumbers pages and changes nothing that can be told from outside."""

import random
import time

import jax
import numpy as np
import pytest

from pagedjax.pages import check, compact, contiguity
from tests.pages.world import GEOMETRIES, OPERATIONS, World, jitted, step

COMPACT, CONTIGUITY = jax.jit(compact), jax.jit(contiguity)


def renumber(world: World) -> None:
    """Compact a world, and give its oracle and its pool the new numbers."""
    before = jax.device_get(world.pages)
    world.pages, source = COMPACT(world.pages)
    source = np.asarray(source)
    assert sorted(source.tolist()) == list(range(world.N))
    label = np.argsort(source)
    world.kv = {(int(label[page]), offset): past for (page, offset), past in world.kv.items()}
    np.testing.assert_array_equal(np.asarray(world.pages.table), label[before.table])
    oracle = world.oracle
    oracle.rows = [[[int(label[p]) for p in group] for group in row] for row in oracle.rows]
    for name in ("counts", "generation"):
        setattr(oracle, name, [getattr(oracle, name)[page] for page in source])
    oracle.hash_of = {p: oracle.hash_of[int(source[p])] for p in range(world.N)}
    oracle.queue = [int(label[p]) for p in oracle.queue]
    for entry in oracle.index.values():
        if entry.parent[0] < world.N:
            entry.parent = (int(label[entry.parent[0]]), entry.parent[1])
    oracle.index = {int(label[p]): entry for p, entry in oracle.index.items()}
    for name in ("buckets", "children"):
        setattr(oracle, name, [[int(label[p]) for p in ways] for ways in getattr(oracle, name)])


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_in_the_middle_of_anything(geometry):
    """The oracle goes on with the new numbers; each row still finds its own past behind every token."""
    seed = time.time_ns() % 2**32
    print(f"seed {seed}")
    world, rng = World(geometry, jitted), random.Random(seed)
    kinds = [kind for kind in OPERATIONS if kind != "pin"]
    better = 0
    for turn in range(300):
        step(world, rng, rng.choice(kinds))
        if turn % 7 == 0:
            was = float(CONTIGUITY(world.pages))
            renumber(world)
            world.verify()
            better += float(CONTIGUITY(world.pages)) > was
    assert better > 5
    world.finish()


def test_rows_that_share_nothing_end_up_in_one_piece():
    world = World("roomy", jitted)
    for _ in range(5):
        world.grow([4, 0, 2], [[1] * 3, [2] * 3, [3] * 3])
    assert float(CONTIGUITY(world.pages)) < 0.5
    renumber(world)
    world.verify()
    assert float(CONTIGUITY(world.pages)) == 1.0
    assert check(world.pages) == []
    again, source = COMPACT(world.pages)
    np.testing.assert_array_equal(source, np.arange(world.N))
    jax.tree.map(np.testing.assert_array_equal, again, world.pages)
