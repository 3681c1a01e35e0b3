"""What is done to memory between two iterations: publish, fork, release, a few slots a trip."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pagedjax.pages import Pages, publish, remap
from pagedjax.simulate.memory import at, give_back, held, pick, rows_of
from pagedjax.simulate.state import Run, Shape, Slots, State


def token_ids(run: Run, request: jax.Array, num: int) -> jax.Array:
    """The first num tokens i32[C, num] of requests i32[C]: a hash of text and position."""
    t = jnp.arange(num, dtype=jnp.int32)[None, :]
    shared = t < at(run.prefix_tokens, request)[:, None]
    text = jnp.where(shared, 2 * at(run.prefix, request)[:, None], 2 * at(run.stream, request)[:, None] + 1)
    position = jnp.where(shared, t, t + at(run.offset, request)[:, None])
    x = text.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) + position.astype(jnp.uint32) * jnp.uint32(0x85EBCA77)
    x = (x ^ (x >> 15)) * jnp.uint32(0x2C1B3C6D)
    x = (x ^ (x >> 12)) * jnp.uint32(0x297A2D39)
    return ((x ^ (x >> 15)) & jnp.uint32(0x7FFFFFFF)).astype(jnp.int32)


def settle(shape: Shape, run: Run, state: State, go: jax.Array) -> tuple[State, jax.Array]:
    """Tidy up some slots. Returns the state, and whether all of them are tidy now."""
    slots = state.slots
    K, Q, R = shape.num_slots, shape.num_requests, shape.num_rows
    memory = state.memory
    if shape.prefix_caching:
        assert isinstance(memory, Pages)
        chosen = pick(slots.unpublished & go, shape.tidied)
        request = at(slots.request, jnp.where(chosen < K, chosen, 0))
        row = jnp.where(chosen < K, chosen * shape.samples, R)
        tokens = token_ids(run, request, shape.pages_per_row * shape.page_size)
        have = at(held(at(run.prompt, slots.request), slots), chosen)
        memory, _ = publish(memory, row, tokens, have, jnp.zeros_like(row))
        slots = slots.replace(unpublished=slots.unpublished.at[chosen].set(False, mode="drop"))
    if shape.shares:
        assert isinstance(memory, Pages)
        chosen = pick(slots.forks & ~slots.unpublished & go, shape.tidied)
        rows = rows_of(shape, chosen)
        others = jnp.where((chosen < K)[:, None], rows[:, 1:], R).reshape(-1)
        first = jnp.repeat(rows[:, 0], shape.samples - 1)
        memory, _ = remap(memory, others, first)
        slots = slots.replace(forks=slots.forks.at[chosen].set(False, mode="drop"))
    chosen = pick(slots.ends & ~slots.unpublished & ~slots.forks & go, shape.tidied)
    rows = jnp.where((chosen < K)[:, None], rows_of(shape, chosen), R).reshape(-1)
    memory = give_back(memory, rows)
    slots = clear(slots, chosen, Q)
    tidy = go & ~jnp.any(slots.ends | slots.unpublished | slots.forks)
    return state.replace(memory=memory, slots=slots), tidy


def clear(slots: Slots, chosen: jax.Array, num_requests: int) -> Slots:
    """Slots i32[C] (padded) become empty."""

    def put(values: jax.Array, value: int | bool) -> jax.Array:
        return values.at[chosen].set(value, mode="drop")

    return Slots(
        request=put(slots.request, num_requests),
        left=put(slots.left, 0),
        generated=put(slots.generated, 0),
        pages=put(slots.pages, 0),
        whole=put(slots.whole, False),
        shared_tail=put(slots.shared_tail, False),
        ends=put(slots.ends, False),
        unpublished=put(slots.unpublished, False),
        forks=put(slots.forks, False),
    )
