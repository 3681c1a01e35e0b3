"""Iterations of the engine: how many at once, how long they take, what they leave behind."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.pages import Pages, remap
from pagedjax.pages.baselines import Buddy
from pagedjax.simulate.account import Usage, add_usage, slot_usage
from pagedjax.simulate.admission import admit
from pagedjax.simulate.grow import copy_tails, decoding, growth, yield_pages
from pagedjax.simulate.memory import at, free_pages, held, occupied, rows_of, take
from pagedjax.simulate.order import FIRST_COME, arrived, charge_output, running_left, scores
from pagedjax.simulate.settle import settle
from pagedjax.simulate.state import (
    FINISHED,
    NUM_BINS,
    WAITING,
    Run,
    Shape,
    State,
    is_active,
)

_NEVER = jnp.inf


class Work(NamedTuple):
    """What one iteration computes; the next differs by `lanes` more tokens of context only."""

    chunk: jax.Array  # i32[slots] prompt tokens
    tokens: jax.Array  # f32 that go through the linear layers
    context: jax.Array  # f32 tokens of keys and values that attention reads
    rows: jax.Array  # f32 rows that it reads them for
    lanes: jax.Array  # f32 decoding rows
    pairs: jax.Array  # f32 query, key in prompts
    moved: jax.Array  # f32 pages to and from the host


def trip(shape: Shape, run: Run, state: State) -> State:
    """Advance one run: tidy up, let somebody yield, let requests in, and where nothing of that is left to do, iterate.

    Every part does a bounded number of requests, and says whether it was all; else the trip ends there, at the same virtual
    time, and the next goes on. What does not apply is masked: nothing here is selected over the whole state.
    """
    go = is_active(run, state)
    state = state.replace(trips=state.trips + go.astype(jnp.int32))
    state, go = settle(shape, run, state, go)
    state, go = yield_pages(shape, run, state, go)
    state, go = admit(shape, run, state, go)
    state, go = copy_tails(shape, run, state, go)
    return iterate(shape, run, state, go)


def add_time(now: jax.Array, seconds: jax.Array) -> jax.Array:
    """now f32[2] + seconds, with what rounding takes away kept in the second part (Knuth's two-sum)."""
    small = seconds + now[1]
    total = now[0] + small
    part = total - now[0]
    lost = (now[0] - (total - part)) + (small - part)
    return jnp.stack([total, lost])


def since(now: jax.Array, then: jax.Array) -> jax.Array:
    """Seconds from then f32[...] to now f32[2]."""
    return (now[0] - then) + now[1]


def plan(shape: Shape, run: Run, state: State) -> Work:
    """All decoding rows take a token; what the budget leaves goes to prompts, in policy order (whole ones: all of it)."""
    slots, n = state.slots, shape.samples
    live = occupied(shape, slots) & ~slots.ends
    decodes = decoding(shape, run, slots)
    prompt = at(run.prompt, slots.request)
    have = held(prompt, slots)
    num_decoding = n * jnp.sum(decodes, dtype=jnp.int32)
    left = jnp.where(live, slots.left, 0)
    chunk = left
    if shape.chunked_prefill:
        score = at(scores(run, state, state.requests.service, running_left(shape, run, state)), slots.request)
        order = jnp.lexsort((slots.request, score, left == 0))
        before = jnp.cumsum(left[order], dtype=jnp.int32) - left[order]
        room = jnp.maximum(run.budget - num_decoding - before, 0)
        chunk = jnp.zeros_like(left).at[order].set(jnp.minimum(left[order], room))

    def total(values: jax.Array) -> jax.Array:
        return jnp.sum(values.astype(jnp.float32))

    prefills = chunk > 0
    size, start = chunk.astype(jnp.float32), have.astype(jnp.float32)
    # A batch that ends together computes the rows that have ended, too.
    idle = n * jnp.sum(live & ~decodes & (slots.left == 0), dtype=jnp.int32)
    return Work(
        chunk=chunk,
        tokens=total(num_decoding + idle) + jnp.sum(size),
        context=n * total(jnp.where(decodes, have + 1, 0)) + total(jnp.where(prefills, have + chunk, 0)),
        rows=total(num_decoding) + total(prefills),
        lanes=total(num_decoding),
        pairs=jnp.sum(jnp.where(prefills, size * start + size * (size + 1) * 0.5, 0.0)),
        moved=state.moved.astype(jnp.float32),
    )


def seconds_of(shape: Shape, run: Run, work: Work, steps: jax.Array) -> jax.Array:
    """Seconds f32[...] that `steps` i32[...] iterations take from here on; see `pagedjax.simulate.cost`."""
    cost, k = run.cost, steps.astype(jnp.float32)
    linear = cost.fixed + jnp.maximum(cost.weights, cost.per_token * work.tokens)
    per_context = cost.per_context + cost.per_page / shape.page_size
    half_page = cost.per_page * work.rows * (shape.page_size - 1) / (2 * shape.page_size)
    first = linear + per_context * work.context + half_page
    later = per_context * work.lanes * k * (k - 1) * 0.5
    moved = (cost.per_moved * shape.page_size + cost.per_moved_page) * work.moved
    return k * first + later + (cost.per_pair * work.pairs + moved)


def steps_until(shape: Shape, run: Run, work: Work, gap: jax.Array) -> jax.Array:
    """The fewest iterations, at least 1, that take at least `gap` seconds; max_jump where those do not."""
    most = shape.max_jump

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) // 2
        enough = seconds_of(shape, run, work, middle) >= gap
        return jnp.where(enough, low, jnp.minimum(middle + 1, high)), jnp.where(enough, middle, high)

    bounds = (jnp.int32(1), jnp.int32(most))
    return lax.fori_loop(0, most.bit_length(), halve, bounds)[1]


def steps_with_pages(shape: Shape, run: Run, state: State) -> jax.Array:
    """The most iterations for which pages are there, at least 1 (that was made sure of)."""
    most = shape.max_jump
    if not shape.grows:
        return jnp.int32(most)
    room = jnp.minimum(free_pages(state.memory), shape.num_rows)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high + 1) // 2
        fits = jnp.sum(growth(shape, run, state, middle), dtype=jnp.int32) <= room
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle - 1)

    bounds = (jnp.int32(1), jnp.int32(most))
    return lax.fori_loop(0, most.bit_length(), halve, bounds)[0]


def jump(shape: Shape, run: Run, state: State, work: Work) -> jax.Array:
    """i32 iterations in which nothing but decoding happens: to the next end, arrival that matters, or lack of pages."""
    slots = state.slots
    decodes = decoding(shape, run, slots)
    ending = jnp.min(jnp.where(decodes, at(run.output, slots.request) - slots.generated, shape.max_jump))
    waiting = state.requests.status == WAITING
    later = jnp.min(jnp.where(waiting & ~arrived(run, state), run.arrival, _NEVER))
    full = jnp.sum(occupied(shape, slots), dtype=jnp.int32) >= jnp.minimum(run.max_running, shape.num_slots)
    matters = ~full & ~run.request_level & ~(state.refused & (run.policy == FIRST_COME))
    bin_end = (jnp.floor((state.now[0] + state.now[1]) / state.bin_seconds) + 1) * state.bin_seconds
    bin_gap = -since(state.now, bin_end)
    gap = jnp.minimum(-since(state.now, jnp.minimum(jnp.where(matters, later, _NEVER), run.horizon)), bin_gap)
    steps = jnp.minimum(steps_until(shape, run, work, gap), jnp.minimum(ending, steps_with_pages(shape, run, state)))
    alone = jnp.any(work.chunk > 0) | (len(shape.beams) > 0)
    return jnp.where(alone, 1, jnp.clip(steps, 1, shape.max_jump))


def iterate(shape: Shape, run: Run, state: State, go: jax.Array) -> State:
    """One iteration or a jump of several; where nobody runs, on to the next arrival."""
    slots = state.slots
    busy = go & jnp.any(occupied(shape, slots))
    work = plan(shape, run, state)
    steps = jnp.where(busy, jump(shape, run, state, work), 0)
    waiting = (state.requests.status == WAITING) & ~arrived(run, state)
    later = jnp.minimum(jnp.min(jnp.where(waiting, run.arrival, _NEVER)), run.horizon)
    idle = go & ~busy & jnp.isfinite(later)
    seconds = jnp.where(busy, seconds_of(shape, run, work, steps), 0.0)
    after = add_time(state.now, seconds)
    after = jnp.where(idle, jnp.stack([later, jnp.zeros_like(later)]), after)

    decodes = decoding(shape, run, slots) & busy
    if shape.grows:
        need = jnp.where(busy, growth(shape, run, state, steps), 0)
        rows = rows_of(shape, jnp.arange(shape.num_slots, dtype=jnp.int32)).reshape(-1)
        need_rows = jnp.repeat(need // shape.samples, shape.samples)
        assert not isinstance(state.memory, Buddy)
        state = state.replace(
            memory=take(shape, state.memory, rows, need_rows, shape.num_rows),
            slots=slots.replace(pages=slots.pages + need),
        )
    usage = slot_usage(shape, run, state, work.chunk, steps)
    state = _bin(shape, run, state, usage, work, steps, after, go)
    return _advance(shape, run, state, jnp.where(busy, work.chunk, 0), decodes, steps, after, busy)


def _bin(
    shape: Shape, run: Run, state: State, usage: Usage, work: Work, steps: jax.Array, after: jax.Array, go: jax.Array
) -> State:
    """Add the iterations up in the bin in which they begin; two bins become one as often as that is too far."""
    begin = state.now[0] + state.now[1]

    def beyond(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        return begin >= carry[0] * NUM_BINS

    def fold(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        width, bins = carry
        return width * 2, jnp.zeros_like(bins).at[: NUM_BINS // 2].set(bins.reshape(NUM_BINS // 2, 2, -1).sum(1))

    width, bins = lax.while_loop(beyond, fold, (state.bin_seconds, state.bins))
    place = jnp.where(go, jnp.floor(begin / width).astype(jnp.int32), NUM_BINS)
    values = add_usage(shape, run, state, usage, work.chunk, steps, since(after, state.now[0]) - state.now[1])
    return state.replace(bin_seconds=width, bins=bins.at[place].add(values, mode="drop"))


def _advance(
    shape: Shape,
    run: Run,
    state: State,
    chunk: jax.Array,
    decodes: jax.Array,
    steps: jax.Array,
    after: jax.Array,
    busy: jax.Array,
) -> State:
    """Tokens, ends and records after the iterations."""
    slots, requests, Q = state.slots, state.requests, shape.num_requests
    prompt, output = at(run.prompt, slots.request), at(run.output, slots.request)
    left = slots.left - chunk
    begins = (chunk > 0) & (left == 0)
    gained = jnp.where(decodes, steps, begins.astype(jnp.int32))
    served = charge_output(shape, run, state, gained)
    generated = slots.generated + gained
    live = occupied(shape, slots) & ~slots.ends
    through = live & (left == 0) & (generated >= output) & busy
    # A batch that ends together ends with its longest request.
    ends = jnp.where(run.request_level, through & jnp.all(through | ~live), through)
    iteration = state.iteration + steps
    waited = since(after, at(run.arrival, slots.request))

    def note(values: jax.Array, mask: jax.Array, update: jax.Array) -> jax.Array:
        return values.at[jnp.where(mask, slots.request, Q)].set(update, mode="drop")

    first = begins & (at(requests.first_iteration, slots.request) < 0)
    where = jnp.broadcast_to(iteration, slots.request.shape)
    requests = requests.replace(
        status=note(requests.status, ends, jnp.full_like(slots.request, FINISHED)),
        first_token=note(requests.first_token, first, waited),
        first_iteration=note(requests.first_iteration, first, where),
        finish=note(requests.finish, ends, waited),
        last_iteration=note(requests.last_iteration, ends, where),
    )
    forks = begins & ~slots.whole & ~through if shape.shares else jnp.zeros_like(begins)
    slots = slots.replace(
        left=left,
        generated=generated,
        whole=slots.whole | begins,
        forks=slots.forks | forks,
        shared_tail=slots.shared_tail | (forks & (prompt % shape.page_size > 0)),
        ends=slots.ends | ends,
        unpublished=slots.unpublished | ((begins | ends) if shape.prefix_caching else jnp.zeros_like(ends)),
    )
    state = state.replace(
        now=after,
        iteration=iteration,
        slots=slots,
        requests=requests,
        refused=state.refused & ~jnp.any(ends),
        moved=jnp.where(busy, 0, state.moved),
        served=served,
    )
    return _survive(shape, state, decodes & ~through) if shape.beams else state


def _survive(shape: Shape, state: State, alive: jax.Array) -> State:
    """After a step each beam goes on from the one that the pattern names."""
    assert isinstance(state.memory, Pages)
    slots, n = state.slots, shape.samples
    pattern = jnp.asarray(shape.beams, jnp.int32)
    parents = pattern[slots.generated % pattern.shape[0]]  # [slots, samples]
    first = jnp.arange(shape.num_slots, dtype=jnp.int32)[:, None] * n
    rows = rows_of(shape, jnp.where(alive, jnp.arange(shape.num_slots, dtype=jnp.int32), shape.num_slots))
    rows = jnp.where(alive[:, None], rows, shape.num_rows)
    memory, _ = remap(state.memory, rows.reshape(-1), (first + parents).reshape(-1))
    return state.replace(memory=memory, slots=slots.replace(shared_tail=slots.shared_tail | alive))
