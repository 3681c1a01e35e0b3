"""What the slots of the memory are at each iteration, added up over a jump in closed form.

The parts are those of Kwon et al. 2023, figure 2. *Tokens*: slots that hold a token, a shared one once. *Reserved*: empty, and
their request will fill them. *Internal*: empty, given to a request that will never fill them (for contiguous reservation:
asked for and not needed). The rest is external: free, or lost to the rounding up of chunks to powers of two.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pagedjax.pages import Pages
from pagedjax.simulate.grow import decoding
from pagedjax.simulate.memory import at, free_pages, held, occupied, pages_of, pages_shared
from pagedjax.simulate.order import arrived
from pagedjax.simulate.state import FINISHED, Run, Shape, State


class Usage(NamedTuple):
    """Sums over iterations, f32."""

    tokens: jax.Array  # slots
    reserved: jax.Array  # slots
    internal: jax.Array  # slots
    mapped: jax.Array  # table entries
    distinct: jax.Array  # pages


def _pages_summed(size: int, tokens: jax.Array) -> jax.Array:
    """ceil(1 / size) + ceil(2 / size) + ... + ceil(tokens / size), i32[...]."""
    full, rest = tokens // size, tokens % size
    return size * (full * (full + 1) // 2) + rest * (full + 1)


def _f32(values: jax.Array) -> jax.Array:
    return jnp.sum(values.astype(jnp.float32))


def slot_usage(shape: Shape, run: Run, state: State, chunk: jax.Array, steps: jax.Array) -> Usage:
    """Sums over the next `steps` iterations (with prompts in them, one). Pages for all of them are taken already; in
    each, the tokens that it computes count."""
    slots, n, S = state.slots, shape.samples, shape.page_size
    prompt, output = at(run.prompt, slots.request), at(run.output, slots.request)
    live = occupied(shape, slots)
    moves = decoding(shape, run, slots)
    have = jnp.where(live, held(prompt, slots), 0)
    k = jnp.where(moves, steps, 0)
    # Tokens of a row, summed: it has one more after each iteration; one that stands still has the same in all.
    computed = jnp.where(slots.left > 0, jnp.maximum(prompt + slots.generated - (slots.left - chunk), 0), have)
    tokens = jnp.where(moves, k * have + k * (k + 1) // 2, steps * jnp.where(live, computed, 0))
    # All rows of a request with samples do the same, but before they go apart there is one.
    rows = jnp.where(live, jnp.where(slots.whole, n, 1), 0)
    if shape.family == "buddy":
        asked = jnp.where(live, at(run.asked, slots.request), 0)
        total = jnp.where(live, prompt + output, 0)
        filled = jnp.where(slots.left > 0, 1, n)
        return Usage(
            tokens=_f32(filled * tokens),
            reserved=_f32(n * steps * total) - _f32(filled * tokens),
            internal=_f32(n * steps * (asked - total)),
            mapped=_f32(n * steps * pages_of(shape, asked)),
            distinct=_f32(n * steps * pages_of(shape, asked)),
        )
    final = jnp.maximum(prompt + output - 1, 1)
    prefills = live & (slots.left > 0)
    now = pages_of(shape, jnp.where(prefills, prompt + slots.generated, have))
    summed = jnp.where(moves, _pages_summed(S, have + k) - _pages_summed(S, have), steps * now)
    then = jnp.where(moves, pages_of(shape, have + k), now)
    # Rows beside the first, of a request that is just computed anew, hold nothing but what they share.
    shared = pages_shared(shape, prompt)
    others = jnp.where(prefills & (chunk < slots.left), steps * shared * S, tokens)
    empty = (summed * S - tokens) + (rows - 1) * (summed * S - others)
    empty = jnp.where(live, empty, 0)
    # In the last page that it needs at all, some slots stay empty for ever.
    last = pages_of(shape, final)
    stays = jnp.where(now >= last, steps, 0)
    in_last = jnp.where(moves, jnp.clip(have + k - jnp.maximum(have, (last - 1) * S), 0, k), stays)
    internal = jnp.where(live, rows * in_last * (last * S - final), 0)
    mapped = jnp.where(live, rows * summed, 0)
    distinct = steps * (shape.num_pages - free_pages(state.memory)) if isinstance(state.memory, Pages) else None
    if distinct is None:
        owned = _f32(mapped)
    else:
        # What is owned now, less what was not taken yet in earlier iterations.
        owned = distinct.astype(jnp.float32) - _f32(jnp.where(moves, n * (k * then - summed), 0))
    return Usage(
        tokens=owned * S - _f32(empty),
        reserved=_f32(empty) - _f32(internal),
        internal=_f32(internal),
        mapped=_f32(mapped),
        distinct=owned,
    )


def add_usage(
    shape: Shape, run: Run, state: State, usage: Usage, chunk: jax.Array, steps: jax.Array, seconds: jax.Array
) -> jax.Array:
    """f32[CHANNELS] of some iterations."""
    slots, n = state.slots, shape.samples
    running = jnp.sum(occupied(shape, slots), dtype=jnp.int32).astype(jnp.float32)
    unfinished = jnp.sum(arrived(run, state) & (state.requests.status != FINISHED), dtype=jnp.int32)
    waiting = unfinished.astype(jnp.float32) - running
    share = 1.0 / (shape.num_pages * shape.page_size)
    begins = (chunk > 0) & (slots.left == chunk)
    generated = n * _f32(jnp.where(decoding(shape, run, slots), steps, begins.astype(jnp.int32)))
    idle = steps == 0
    return jnp.stack(
        [
            seconds,
            steps.astype(jnp.float32),
            running * seconds,
            waiting * seconds,
            jnp.where(idle, 0.0, usage.tokens * share),
            jnp.where(idle, 0.0, usage.reserved * share),
            jnp.where(idle, 0.0, usage.internal * share),
            jnp.where(idle, 0.0, usage.mapped),
            jnp.where(idle, 0.0, usage.distinct),
            jnp.where(idle, 0.0, generated),
            jnp.where(idle, 0.0, _f32(chunk)),
        ]
    )
