"""The verbs against the oracle: long random runs, compiled, eager and mapped. Every run prints its seed."""

import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from pagedjax.pages import init_pages
from tests.pages.world import GEOMETRIES, OPERATIONS, VERBS, World, eager, jitted, step


def drive(world: World, num_operations: int, seed: int | None = None) -> None:
    seed = time.time_ns() % 2**32 if seed is None else seed
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(num_operations):
        step(world, rng, rng.choice(OPERATIONS))


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_jitted_verbs_agree_with_the_oracle(geometry):
    world = World(geometry, jitted)
    drive(world, 2500)  # about 3,400 calls of verbs
    assert world.failures > 0
    assert world.copies > 0
    assert world.hits > 0
    assert (world.given_back > 0) == any(world.windows)
    world.finish()


def test_a_page_that_gets_its_place_back_has_followers_in_the_index_again():
    """A run that once published two pages with the same past and content: `check`, after every operation, finds that."""
    drive(World("windows", jitted), 100, seed=1946209416)


@pytest.mark.parametrize(("geometry", "num_operations"), [("collisions", 60), ("windows", 25)])
def test_eager_verbs_agree_with_the_oracle(geometry, num_operations):
    world = World(geometry, eager)
    drive(world, num_operations)
    world.finish()


@pytest.mark.parametrize("geometry", ["collisions", "windows"])
def test_mapped_verbs_agree_with_single_ones(geometry):
    """Three worlds go through the same kinds of operations with arguments of their own, then all at once under vmap."""
    seed = time.time_ns() % 2**32
    print(f"seed {seed}")
    calls, states = [[], [], []], [[], [], []]

    def recording(lane):
        def run(name, pages, *args):
            out = jitted(name, pages, *args)
            states[lane].append(jax.tree.map(np.asarray, out))
            return out

        return run

    kinds = random.Random(seed).choices(OPERATIONS, k=150)
    for lane in range(3):
        world, rng = World(geometry, recording(lane), record=calls[lane]), random.Random(seed + lane)
        for kind in kinds:
            step(world, rng, kind)
    mapped = {name: jax.jit(jax.vmap(verb), donate_argnums=0) for name, verb in VERBS.items()}
    single = init_pages(**GEOMETRIES[geometry])
    pages = jax.tree.map(lambda x: jnp.stack([x] * 3), single)
    for position, lanes in enumerate(zip(*calls, strict=True)):
        (name,) = {name for name, _ in lanes}
        pages, *results = mapped[name](
            pages, *(jnp.stack(args) for args in zip(*(args for _, args in lanes), strict=True))
        )
        want = jax.tree.map(lambda *x: np.stack(x), *(lane[position] for lane in states))
        jax.tree.map(np.testing.assert_array_equal, (pages, *results), want)


class PagesMachine(RuleBasedStateMachine):
    """The same world, driven by Hypothesis, which shrinks what fails."""

    def __init__(self):
        super().__init__()
        self.world = World("collisions", jitted)

    @rule(kind=st.sampled_from(OPERATIONS), rng=st.randoms(use_true_random=False))
    def operate(self, kind, rng):
        step(self.world, rng, kind)

    @precondition(lambda self: self.world.pins)
    @rule()
    def unpin_all(self):
        self.world.unpin(self.world.pins[: self.world.R])

    def teardown(self):
        self.world.finish()


TestPagesMachine = PagesMachine.TestCase
TestPagesMachine.settings = settings(
    max_examples=12, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
