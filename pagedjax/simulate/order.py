"""Who goes first: the policies of `pagedjax.policy` over all requests at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pagedjax.policy import OUTPUT_WEIGHT, POLICIES, Features
from pagedjax.simulate.memory import at, occupied
from pagedjax.simulate.state import Run, Shape, State

FIRST_COME = 0
"""Index of the policy under which whoever comes later changes nothing."""
assert next(iter(POLICIES)) == "first_come"


def arrived(run: Run, state: State) -> jax.Array:
    """bool[Q]"""
    return (run.arrival - state.now[0] <= state.now[1]) & (run.prompt > 0)


def scores(run: Run, state: State, service: jax.Array, left: jax.Array) -> jax.Array:
    """f32[Q] what the policy says of each request; equal ones go by arrival.

    Args:
      service: f32[Q].
      left: i32[Q] tokens to compute before it decodes; all of its own for one that waits.
    """
    known = run.prompt + state.requests.generated
    features = Features(
        arrival=jnp.arange(run.prompt.shape[0], dtype=jnp.int32),
        priority=run.priority,
        num_tokens=known,
        num_computed=known - left,
        num_cached=jnp.zeros_like(known),
        max_tokens=run.prompt + run.output,
        service=service,
        waited=state.now[0] - run.arrival,
        time_left=run.deadline - state.now[0],
    )
    # A traced choice: all of them are a few operations.
    return jnp.stack([jnp.asarray(policy(features)) for policy in POLICIES.values()])[run.policy]


def running_left(shape: Shape, run: Run, state: State) -> jax.Array:
    """i32[Q] tokens to compute: of the slot where it runs, else all that is known."""
    known = run.prompt + state.requests.generated
    where = jnp.where(occupied(shape, state.slots), state.slots.request, shape.num_requests)
    return known.at[where].set(state.slots.left, mode="drop")


def charge_output(shape: Shape, run: Run, state: State, tokens: jax.Array) -> jax.Array:
    """f32[tenants] after slots generated `tokens` i32[slots]."""
    if shape.num_tenants == 1:
        return state.served
    tenant = at(run.tenant, state.slots.request)
    weight = jnp.where(occupied(shape, state.slots), tokens, 0).astype(jnp.float32) * jnp.float32(OUTPUT_WEIGHT)
    return state.served.at[tenant].add(weight)
