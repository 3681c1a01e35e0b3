"""The verbs against the oracle: long random runs, compiled, eager and mapped."""

import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.pages.world import GEOMETRIES, OPERATIONS, VERBS, Jitted, World, eager, step

JITTED = {geometry: Jitted() for geometry in GEOMETRIES}


def drive(world: World, seed: int, num_operations: int) -> None:
    rng = random.Random(seed)
    print(f"seed {seed}")
    for _ in range(num_operations):
        step(world, rng, rng.choice(OPERATIONS))


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_jitted_verbs_agree_with_the_oracle(geometry):
    seed = time.time_ns() % 2**32
    world = World(geometry, JITTED[geometry])
    drive(world, seed, 3400)
    assert world.failures and world.copies
    assert world.hits or not world.indexed
    world.finish()


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_eager_verbs_agree_with_the_oracle(geometry):
    world = World(geometry, eager)
    drive(world, time.time_ns() % 2**32, 100)
    world.finish()
