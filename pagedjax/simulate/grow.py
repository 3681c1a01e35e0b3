"""Growing by the next token: how many pages that takes, who yields where they are not there, and copy-on-write."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pagedjax.pages import Pages, cow, cow_need
from pagedjax.simulate.memory import at, free_pages, held, occupied, pages_of, pick, rows_of
from pagedjax.simulate.order import arrived, running_left, scores
from pagedjax.simulate.state import RUNNING, WAITING, Run, Shape, Slots, State


def growth(shape: Shape, run: Run, state: State, steps: int | jax.Array = 1) -> jax.Array:
    """i32[slots] pages that decoding slots take in the next `steps` iterations, copies aside."""
    slots = state.slots
    have = held(at(run.prompt, slots.request), slots)
    grown = shape.samples * (pages_of(shape, have + steps) - pages_of(shape, have))
    return jnp.where(decoding(shape, run, slots), grown, 0)


def decoding(shape: Shape, run: Run, slots: Slots) -> jax.Array:
    """bool[slots] runs, has its prompt computed, and is not at its end (as in a batch that ends together)."""
    return occupied(shape, slots) & (slots.left == 0) & (slots.generated < at(run.output, slots.request)) & ~slots.ends


def tail_rows(shape: Shape, run: Run, slots: Slots, chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(rows, logical) i32[C * samples] that slots i32[C] (padded) write into next."""
    column = pages_logical(shape, run, slots)
    real = (chosen < shape.num_slots)[:, None]
    rows = jnp.where(real, rows_of(shape, chosen), shape.num_rows).reshape(-1)
    return rows, jnp.repeat(at(column, chosen), shape.samples)


def pages_logical(shape: Shape, run: Run, slots: Slots) -> jax.Array:
    """i32[slots] logical page of the next token."""
    return held(at(run.prompt, slots.request), slots) // shape.page_size


def copies(shape: Shape, run: Run, state: State) -> jax.Array:
    """i32[slots] pages that the next token has copied, as other rows of the request hold the last page too."""
    slots = state.slots
    due = slots.shared_tail & decoding(shape, run, slots)
    if not shape.beams:
        return jnp.where(due, shape.samples - 1, 0)
    assert isinstance(state.memory, Pages)
    every = jnp.where(due, jnp.arange(shape.num_slots, dtype=jnp.int32), shape.num_slots)
    need = cow_need(state.memory, *tail_rows(shape, run, slots, every))
    return jnp.sum(need.reshape(shape.num_slots, shape.samples), axis=1, dtype=jnp.int32)


def yield_pages(shape: Shape, run: Run, state: State, go: jax.Array) -> tuple[State, jax.Array]:
    """Where running requests cannot all take their next token, the last in policy order yields, whole.

    Returns the state, and whether nobody had to.
    """
    if not shape.grows:
        return state, go
    need = jnp.sum(growth(shape, run, state) + copies(shape, run, state), dtype=jnp.int32)
    short = go & (need > free_pages(state.memory))
    requests, slots = state.requests, state.slots
    Q, K = shape.num_requests, shape.num_slots
    score = scores(run, state, requests.service, running_left(shape, run, state))
    score = jnp.where(requests.status == RUNNING, score, -jnp.inf)
    # Of equal ones the youngest.
    victim = (Q - 1 - jnp.argmax(score[::-1])).astype(jnp.int32)
    slot = jnp.argmax(slots.request == victim).astype(jnp.int32)
    pages = slots.pages[slot]
    swaps = run.swap & (slots.left[slot] == 0) & (state.host_used + pages <= run.host_pages)
    moved = jnp.where(short & swaps, pages, 0)
    who, where = jnp.where(short, victim, Q), jnp.where(short, slot, K)
    done = held(at(run.prompt, slots.request), slots)[slot]
    requests = requests.replace(
        status=requests.status.at[who].set(WAITING, mode="drop"),
        generated=requests.generated.at[who].set(slots.generated[slot], mode="drop"),
        swapped=requests.swapped.at[who].set(moved, mode="drop"),
        preemptions=requests.preemptions.at[who].add(1, mode="drop"),
    )
    slots = slots.replace(
        ends=slots.ends.at[where].set(True, mode="drop"),
        # Copies that were due are no more.
        shared_tail=slots.shared_tail.at[where].set(False, mode="drop"),
    )
    if shape.prefix_caching:
        slots = slots.replace(unpublished=slots.unpublished.at[where].set(True, mode="drop"))
    return state.replace(
        requests=requests,
        slots=slots,
        refused=state.refused | short,
        noticed=jnp.where(short, jnp.sum(arrived(run, state), dtype=jnp.int32), state.noticed),
        moved=state.moved + moved,
        host_used=state.host_used + moved,
        swapped_out=state.swapped_out + moved,
        recomputed=state.recomputed + jnp.where(short & ~swaps, done, 0),
    ), go & ~short


def copy_tails(shape: Shape, run: Run, state: State, go: jax.Array) -> tuple[State, jax.Array]:
    """Copy-on-write for some of the slots whose rows share the page that they write into next.

    Returns the state, and whether that was all of them.
    """
    if not shape.shares:
        return state, go
    assert isinstance(state.memory, Pages)
    slots = state.slots
    due = slots.shared_tail & decoding(shape, run, slots)
    chosen = pick(due & go, shape.tidied)
    memory, _, _ = cow(state.memory, *tail_rows(shape, run, slots, chosen))
    slots = slots.replace(
        shared_tail=slots.shared_tail.at[chosen].set(False, mode="drop"),
        pages=slots.pages if shape.beams else slots.pages.at[chosen].add(shape.samples - 1, mode="drop"),
    )
    more = jnp.any(slots.shared_tail & decoding(shape, run, slots))
    return state.replace(memory=memory, slots=slots), go & ~more
