"""Who is let in: the host scheduler's rules as an array program."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.pages import Pages, match, remap
from pagedjax.pages.baselines import Buddy, reserve
from pagedjax.policy import PROMPT_WEIGHT
from pagedjax.simulate.grow import decoding
from pagedjax.simulate.memory import (
    at,
    free_pages,
    give_back,
    occupied,
    pages_of,
    pages_shared,
    pages_total,
    rows_of,
    take,
)
from pagedjax.simulate.order import FIRST_COME, arrived, running_left, scores
from pagedjax.simulate.settle import token_ids
from pagedjax.simulate.state import RUNNING, WAITING, Run, Shape, State


class Choice(NamedTuple):
    """Requests let in, padded with Q, and their slots, padded with the number of slots; i32[C] each."""

    request: jax.Array
    slot: jax.Array


class _View(NamedTuple):
    """What is the same for all candidates of a trip."""

    here: jax.Array  # bool[Q] has arrived
    left: jax.Array  # i32[Q] tokens to compute
    lanes: jax.Array  # i32 rows that decode
    score: jax.Array  # f32[Q] of those that wait; with tenants it changes with each that is let in


class _Picked(NamedTuple):
    """The carry over candidates."""

    stop: jax.Array  # bool
    refused: jax.Array  # bool
    status: jax.Array  # i32[Q]
    request: jax.Array  # i32[slots]
    available: jax.Array  # i32 pages beside those that running requests are expected to take
    prefill: jax.Array  # i32 tokens of prompts in this iteration
    running: jax.Array  # i32 requests
    served: jax.Array  # f32[tenants]
    service: jax.Array  # f32[Q]
    last: jax.Array  # i32
    memory: Any  # Buddy, or nothing


def expected(shape: Shape, run: Run, prompt: jax.Array, output: jax.Array, generated: jax.Array) -> jax.Array:
    """i32 tokens that a request is expected to hold yet: the next one, and a share of what it may still generate."""
    del shape
    known = prompt + generated
    more = (run.growth_share * (output - generated).astype(jnp.float32)).astype(jnp.int32)
    # The last token's keys and values are never needed.
    return jnp.maximum(jnp.minimum(known + 1 + more, prompt + output - 1), 1)


def outstanding(shape: Shape, run: Run, state: State) -> jax.Array:
    """i32 pages that the running requests are expected to take yet."""
    slots = state.slots
    prompt, output = at(run.prompt, slots.request), at(run.output, slots.request)
    then = pages_total(shape, prompt, expected(shape, run, prompt, output, slots.generated))
    more = jnp.maximum(then - slots.pages, 0)
    if shape.beams:
        more = more + jnp.where(slots.whole, shape.samples, 0)
    return jnp.sum(jnp.where(occupied(shape, slots), more, 0), dtype=jnp.int32)


def _lift(shape: Shape, run: Run, state: State, waiting: jax.Array, may: jax.Array) -> State:
    """Tenants that had nobody waiting, and have now, do not bring saved-up idle time along."""
    if shape.num_tenants == 1:
        return state
    queued = _tenants_of(shape, run, waiting)
    least = jnp.min(jnp.where(state.queued, state.served, jnp.inf))
    least = jnp.where(jnp.any(state.queued), least, state.served[state.last_tenant])
    served = jnp.where(queued & ~state.queued, jnp.maximum(state.served, least), state.served)
    return state.replace(served=jnp.where(may, served, state.served))


def _tenants_of(shape: Shape, run: Run, waiting: jax.Array) -> jax.Array:
    """bool[tenants] who has a request among the masked ones bool[Q]."""
    T = shape.num_tenants
    return jnp.zeros(T, jnp.bool_).at[jnp.where(waiting, run.tenant, T)].set(True, mode="drop")


def _consider(shape: Shape, run: Run, state: State, view: _View, carry: _Picked) -> tuple[_Picked, Choice]:
    """The next candidate: the first in policy order of those that wait. It is let in, or stops it all."""
    Q, K = shape.num_requests, shape.num_slots
    here, left, lanes = view.here, view.left, view.lanes
    score = view.score
    if shape.num_tenants > 1:
        score = scores(run, state, carry.served[run.tenant], left)
    waits = here & (carry.status == WAITING)
    i = jnp.argmin(jnp.where(waits, score, jnp.inf)).astype(jnp.int32)
    i = jnp.where(jnp.any(waits & (score < jnp.inf)), i, jnp.argmax(waits).astype(jnp.int32))
    slot = jnp.argmax(carry.request == Q).astype(jnp.int32)
    there = waits[i] & (carry.request[slot] == Q) & (carry.running < run.max_running) & ~carry.stop
    if shape.prefix_caching:
        there = there & ~_waits_for_prefix(shape, run, state, i)
    known = run.prompt[i] + state.requests.generated[i]
    tokens = jnp.where(state.requests.swapped[i] > 0, 0, known)
    if not shape.chunked_prefill:
        # One prompt is let in, however long it is.
        there = there & ((carry.prefill == 0) | (carry.prefill + lanes + tokens <= run.budget) | (tokens == 0))
    need, memory = jnp.int32(0), carry.memory
    promised = need
    if shape.grows:
        want = expected(shape, run, run.prompt[i], run.output[i], state.requests.generated[i])
        promised = need = pages_total(shape, run.prompt[i], want)
        if shape.beams:
            # A copy for each beam is kept free for those that go apart already, and is asked of everybody at first.
            need = need + shape.samples
            promised = promised + jnp.where(state.requests.generated[i] > 0, shape.samples, 0)
        fits = (need <= carry.available) | (carry.running == 0)
    else:
        rows = rows_of(shape, slot[None])[0]
        units = jnp.broadcast_to(pages_of(shape, run.asked[i]), rows.shape)
        rows = jnp.where(there, rows, shape.num_rows)
        memory, ok = reserve(memory, rows, units, together=shape.samples)
        fits = ok[0]
    if shape.prefix_caching:
        fits = jnp.bool_(True)  # decided when it is known what the cache has
    yes = there & fits
    who = jnp.where(yes, i, Q)
    new = run.tenant[i] if shape.num_tenants > 1 else jnp.int32(0)
    first = state.requests.first_admitted[i] < 0
    charge = jnp.where(yes & first, jnp.float32(PROMPT_WEIGHT) * known.astype(jnp.float32), 0.0)
    return _Picked(
        stop=carry.stop | ~yes,
        refused=carry.refused | (there & ~fits),
        status=carry.status.at[who].set(RUNNING, mode="drop"),
        request=carry.request.at[jnp.where(yes, slot, K)].set(i, mode="drop"),
        available=carry.available - jnp.where(yes, promised, 0),
        prefill=carry.prefill + jnp.where(yes, tokens, 0),
        running=carry.running + yes.astype(jnp.int32),
        served=carry.served.at[new].add(charge),
        service=carry.service.at[who].set(carry.served[new], mode="drop"),
        last=jnp.where(yes, new, carry.last),
        memory=memory,
    ), Choice(who, jnp.where(yes, slot, K))


def admit(shape: Shape, run: Run, state: State, go: jax.Array) -> tuple[State, jax.Array]:
    """Let in the first in policy order, as long as there is room; the first that finds none makes the others wait.

    Returns the state, and whether nobody else can be let in now.
    """
    K = shape.num_slots
    here = arrived(run, state)
    none_runs = ~jnp.any(occupied(shape, state.slots))
    news = (run.policy != FIRST_COME) & (jnp.sum(here, dtype=jnp.int32) > state.noticed)
    refused = state.refused & ~none_runs & ~news
    # A batch that ends together takes nobody in once it has begun.
    begun = run.request_level & jnp.any(occupied(shape, state.slots) & (state.slots.generated > 0))
    may = go & ~refused & ~begun
    state = _lift(shape, run, state, here & (state.requests.status == WAITING), may)

    prefill = jnp.where(occupied(shape, state.slots), state.slots.left, 0)
    start = _Picked(
        stop=~may,
        refused=refused,
        status=state.requests.status,
        request=state.slots.request,
        available=(free_pages(state.memory) - outstanding(shape, run, state)) if shape.grows else jnp.int32(0),
        prefill=jnp.sum(prefill, dtype=jnp.int32),
        running=jnp.sum(occupied(shape, state.slots), dtype=jnp.int32),
        served=state.served,
        service=state.requests.service,
        last=state.last_tenant,
        memory=() if shape.grows else state.memory,
    )
    left = running_left(shape, run, state)
    view = _View(
        here=here,
        left=left,
        lanes=shape.samples * jnp.sum(decoding(shape, run, state.slots), dtype=jnp.int32),
        score=scores(run, state, start.service, left),
    )

    if shape.prefix_caching:
        end, choice = _consider(shape, run, state, view, start)
        choice = Choice(choice.request[None], choice.slot[None])
        return _admit_cached(shape, run, state, start, end, choice, here, go)
    end, choice = lax.scan(
        lambda carry, _: _consider(shape, run, state, view, carry), start, None, length=shape.admitted
    )
    if not shape.grows:
        state = state.replace(memory=end.memory)
    state = _keep(shape, run, state, end, here, may)
    state = _place(shape, run, state, choice, jnp.zeros_like(choice.slot))
    return state, go & ~jnp.all(choice.slot < K)


def _keep(shape: Shape, run: Run, state: State, end: _Picked, here: jax.Array, may: jax.Array) -> State:
    queued = state.queued
    if shape.num_tenants > 1:
        queued = jnp.where(may, _tenants_of(shape, run, here & (end.status == WAITING)), queued)
    return state.replace(
        requests=state.requests.replace(status=end.status, service=end.service),
        slots=state.slots.replace(request=end.request),
        refused=jnp.where(may, end.refused, state.refused),
        noticed=jnp.where(may & end.refused, jnp.sum(here, dtype=jnp.int32), state.noticed),
        served=end.served,
        queued=queued,
        last_tenant=end.last,
    )


def _waits_for_prefix(shape: Shape, run: Run, state: State, i: jax.Array) -> jax.Array:
    """bool: a running request is just computing a page that request i could share once it is published."""
    slots = state.slots
    other = slots.request
    computing = occupied(shape, slots) & (slots.left > 0)
    known = at(run.prompt, other) + slots.generated
    limit = jnp.minimum(known, run.prompt[i] + state.requests.generated[i] - 1)
    mine, theirs = run.prefix_tokens[i], at(run.prefix_tokens, other)
    same_text = (at(run.stream, other) == run.stream[i]) & (at(run.offset, other) == run.offset[i])
    same_prefix = at(run.prefix, other) == run.prefix[i]
    # Where one's shared prefix ends before the other's, the texts differ.
    common = jnp.where(same_prefix | (mine == 0), jnp.minimum(mine, theirs), 0)
    whole = same_text & (mine == theirs) & (same_prefix | (mine == 0))
    common = jnp.minimum(jnp.where(whole, limit, common), limit)
    # What it found itself is published; what it computes is, once all of its prompt is.
    return jnp.any(computing & (common // shape.page_size * shape.page_size > known - slots.left))


def _admit_cached(
    shape: Shape, run: Run, state: State, start: _Picked, end: _Picked, choice: Choice, here: jax.Array, go: jax.Array
) -> tuple[State, jax.Array]:
    """The one candidate of a trip, where what it needs is known after its matched pages are mapped."""
    assert isinstance(state.memory, Pages)
    Q, K, R = shape.num_requests, shape.num_slots, shape.num_rows
    i, slot = choice.request, choice.slot
    prompt, generated, swapped = at(run.prompt, i), at(state.requests.generated, i), at(state.requests.swapped, i)
    fresh = (i < Q) & (swapped == 0) & ((generated == 0) if shape.shares else True)
    row = jnp.where(fresh, slot * shape.samples, R)
    tokens = token_ids(run, i, shape.pages_per_row * shape.page_size)
    memory, found = match(state.memory, row, tokens, prompt + generated, jnp.zeros_like(row))
    found = jnp.where(fresh, found, 0)
    want = expected(shape, run, prompt, at(run.output, i), generated)
    need = pages_total(shape, prompt, want) - found + (shape.samples if shape.beams else 0)
    room = memory.num_unowned - outstanding(shape, run, state)
    fits = (i < Q) & ((need <= room) | (start.running == 0))
    kept = give_back(memory, jnp.where(fits, R, row))
    tried, yes = i[0] < Q, fits[0]
    end = jax.tree.map(lambda new, old: jnp.where(yes, new, old), end, start)._replace(
        refused=start.refused | (tried & ~yes)
    )
    if shape.num_tenants > 1:
        # What the cache had is not charged.
        first = yes & (at(state.requests.first_admitted, i)[0] < 0)
        less = jnp.where(first, jnp.float32(PROMPT_WEIGHT * shape.page_size) * found[0].astype(jnp.float32), 0.0)
        end = end._replace(served=end.served.at[end.last].add(-less))
    state = _keep(shape, run, state.replace(memory=kept), end, here, ~start.stop)
    choice = Choice(jnp.where(fits, i, Q), jnp.where(fits, slot, K))
    return _place(shape, run, state, choice, jnp.where(fits, found, 0)), go & ~yes


def _place(shape: Shape, run: Run, state: State, choice: Choice, found: jax.Array) -> State:
    """Give requests let in their pages and their slots; `found` i32[C] pages are mapped already."""
    K, n = shape.num_slots, shape.samples
    i, slot = choice
    requests, slots = state.requests, state.slots
    prompt, generated, swapped = at(run.prompt, i), at(requests.generated, i), at(requests.swapped, i)
    yes = slot < K
    back = swapped > 0
    known = prompt + generated
    tokens = jnp.where(back, known - 1, known)
    # Samples that went apart before come back apart; at first, samples that share are one row.
    apart = yes & (n > 1) & ((generated > 0) | (not shape.shares))
    shared = pages_shared(shape, prompt)
    logical = pages_of(shape, tokens)
    state = _take(shape, state, slot, yes, apart, logical, shared, found)
    pages = jnp.where(apart, shared + n * (logical - shared), logical)
    left = jnp.where(apart & (generated > 0), prompt + n * generated, known - found * shape.page_size)
    first = yes & (requests.first_admitted.at[i].get(mode="fill", fill_value=0) < 0)

    def put(values: jax.Array, update: Any) -> jax.Array:
        return values.at[slot].set(update, mode="drop")

    moved = jnp.sum(jnp.where(yes, swapped, 0), dtype=jnp.int32)
    return state.replace(
        requests=requests.replace(
            swapped=requests.swapped.at[i].set(0, mode="drop"),
            first_admitted=requests.first_admitted.at[jnp.where(first, i, shape.num_requests)].set(
                state.iteration, mode="drop"
            ),
            cached=requests.cached.at[jnp.where(first, i, shape.num_requests)].set(
                found * shape.page_size, mode="drop"
            ),
        ),
        slots=slots.replace(
            left=put(slots.left, jnp.where(back, 0, left)),
            generated=put(slots.generated, generated),
            pages=put(slots.pages, pages),
            whole=put(slots.whole, apart | (n == 1)),
        ),
        moved=state.moved + moved,
        host_used=state.host_used - moved,
        swapped_in=state.swapped_in + moved,
    )


def _take(
    shape: Shape,
    state: State,
    slot: jax.Array,
    yes: jax.Array,
    apart: jax.Array,
    logical: jax.Array,
    shared: jax.Array,
    found: jax.Array,
) -> State:
    """Pages for requests let in: all of the first row's, or what the rows share and then each row's own."""
    if isinstance(state.memory, Buddy):
        return state
    R, P, n = shape.num_rows, shape.pages_per_row, shape.samples
    rows = jnp.where(yes[:, None], rows_of(shape, slot), R)
    need = jnp.where(apart, shared, logical - found)
    memory = take(shape, state.memory, rows[:, 0], need, shape.admitted * P)
    if n > 1:
        if shape.shares:
            assert isinstance(memory, Pages)
            others = jnp.where(apart[:, None], rows[:, 1:], R).reshape(-1)
            memory, _ = remap(memory, others, jnp.repeat(rows[:, 0], n - 1))
        own = jnp.where(apart[:, None], rows, R).reshape(-1)
        memory = take(shape, memory, own, jnp.repeat(logical - shared, n), shape.admitted * n * P)
    return state.replace(memory=memory)
