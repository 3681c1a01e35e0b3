"""What a simulation consists of: its static shape, one run's parameters, and the state that a trip advances."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from pagedjax.pages import Pages, init_pages
from pagedjax.pages.baselines import Buddy, Chunks, init_buddy, init_chunks
from pagedjax.simulate.cost import StepCost

NUM_BINS = 128
"""Time bins of a run. When they are full, two become one, so that at least half of them are in use."""

WAITING, RUNNING, FINISHED = 0, 1, 2

CHANNELS = (
    "seconds",  # how long the bin's iterations took, idle time included
    "iterations",
    "running",  # requests, times seconds
    "waiting",  # requests that have arrived, times seconds
    "tokens",  # share of the slots that hold a token, times iterations; likewise the next two
    "reserved",  # empty, and their request will fill them
    "internal",  # empty, given to a request that will not fill them
    "mapped",  # table entries, times iterations
    "distinct",  # pages that they name, times iterations
    "generated",  # tokens
    "computed",  # prompt tokens, those computed again included
)
"""What is added up per bin."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is compiled for. Runs of one shape are mapped over.

    A row is a sequence. A request has `samples` of them, in adjoining rows: a slot. So there are slots x samples rows.
    """

    family: str  # paged, chunks, or buddy
    page_size: int  # S, tokens in a page, chunk or unit
    num_pages: int  # U, usable ones
    num_slots: int
    samples: int
    pages_per_row: int  # P
    num_requests: int  # Q
    num_tenants: int = 1
    prefix_caching: bool = False
    chunked_prefill: bool = False
    beams: tuple[tuple[int, ...], ...] = ()  # for each step, each beam's parent; repeated; empty: parallel samples
    max_jump: int = 2048  # most iterations at once
    width: int = 4  # requests let in, and slots tidied up, in one trip

    @property
    def num_rows(self) -> int:
        """R."""
        return self.num_slots * self.samples

    @property
    def shares(self) -> bool:
        """Whether the samples of a request share the pages of its prompt."""
        return self.family == "paged" and self.samples > 1

    @property
    def grows(self) -> bool:
        """Whether sequences take pages as they grow."""
        return self.family != "buddy"

    @property
    def tidied(self) -> int:
        """Slots that are tidied up in one trip: all of them where beams make every step touch them."""
        return self.num_slots if self.beams else min(self.width, self.num_slots)

    @property
    def admitted(self) -> int:
        """Requests let in in one trip: one where the prefix cache decides how much it needs."""
        return 1 if self.prefix_caching else min(self.width, self.num_slots)


class Run(struct.PyTreeNode):
    """One run's parameters; everything here may be mapped over. Q requests in order of arrival, padded with prompt 0."""

    arrival: jax.Array  # f32[Q] seconds
    prompt: jax.Array  # i32[Q]
    output: jax.Array  # i32[Q]
    asked: jax.Array  # i32[Q] tokens of memory that a request is given at once; only for family buddy
    prefix: jax.Array  # i32[Q]
    prefix_tokens: jax.Array  # i32[Q]
    stream: jax.Array  # i32[Q]
    offset: jax.Array  # i32[Q]
    priority: jax.Array  # i32[Q]
    tenant: jax.Array  # i32[Q]
    deadline: jax.Array  # f32[Q] seconds from the beginning
    cost: StepCost  # f32 each
    policy: jax.Array  # i32 index into pagedjax.policy.POLICIES
    growth_share: jax.Array  # f32
    max_running: jax.Array  # i32 requests at once
    budget: jax.Array  # i32 tokens in one step
    request_level: jax.Array  # bool: a batch is formed only when the one before has ended
    swap: jax.Array  # bool: preempted requests keep their pages, in host memory
    host_pages: jax.Array  # i32 room for them
    horizon: jax.Array  # f32 seconds; what is not finished by then is left


class Slots(struct.PyTreeNode):
    """The running requests; an array [slots] each."""

    request: jax.Array  # i32 Q where empty
    left: jax.Array  # i32 tokens to compute before it decodes
    generated: jax.Array  # i32 by each sample
    pages: jax.Array  # i32 physical pages of all its rows (with beams: most that they can be)
    whole: jax.Array  # bool: all its rows hold pages, not the first alone
    shared_tail: jax.Array  # bool: its rows share the page that they write into next
    ends: jax.Array  # bool: to be released
    unpublished: jax.Array  # bool: to be entered into the prefix index
    forks: jax.Array  # bool: its other rows are to be made


class Requests(struct.PyTreeNode):
    """Where each request is, and what became of it; an array [Q] each. Times are from the arrival on."""

    status: jax.Array  # i32 WAITING, RUNNING or FINISHED
    generated: jax.Array  # i32 before it was last preempted
    swapped: jax.Array  # i32 pages that it has in host memory
    service: jax.Array  # f32 what its tenant had been served when it was let in
    first_token: jax.Array  # f32 seconds
    finish: jax.Array  # f32 seconds
    first_admitted: jax.Array  # i32 iteration; -1 while not
    first_iteration: jax.Array  # i32 iteration that gave the first token
    last_iteration: jax.Array  # i32 iteration that gave the last
    preemptions: jax.Array  # i32
    cached: jax.Array  # i32 prompt tokens found in the prefix cache at first


class State(struct.PyTreeNode):
    """All of it."""

    memory: Pages | Chunks | Buddy
    now: jax.Array  # f32[2] seconds, as a sum of two so that hours of milliseconds add up
    iteration: jax.Array  # i32
    slots: Slots
    requests: Requests
    refused: jax.Array  # bool: somebody found no room or yielded, and nobody ended since
    noticed: jax.Array  # i32 requests that had arrived then
    moved: jax.Array  # i32 pages to or from the host, to be paid for by the next iteration
    host_used: jax.Array  # i32 pages
    swapped_out: jax.Array  # i32 pages, in all
    swapped_in: jax.Array  # i32 pages, in all
    recomputed: jax.Array  # i32 tokens that had been computed before
    served: jax.Array  # f32[tenants] see pagedjax.policy.tenants
    queued: jax.Array  # bool[tenants] had somebody waiting at the last admission
    last_tenant: jax.Array  # i32 of the request let in last
    bin_seconds: jax.Array  # f32
    bins: jax.Array  # f32[NUM_BINS, len(CHANNELS)]
    trips: jax.Array  # i32 that did something


def init_memory(shape: Shape) -> Pages | Chunks | Buddy:
    """All of it free."""
    if shape.family == "paged":
        return init_pages(
            num_pages=shape.num_pages + 1,
            page_size=shape.page_size,
            max_rows=shape.num_rows,
            max_pages_per_row=shape.pages_per_row,
            secret=(1, 2),
            num_buckets=None if shape.prefix_caching else 1,
        )
    if shape.family == "chunks":
        return init_chunks(num_chunks=shape.num_pages, max_rows=shape.num_rows, max_chunks_per_row=shape.pages_per_row)
    if shape.family == "buddy":
        largest = max(shape.pages_per_row - 1, 0).bit_length()
        return init_buddy(num_units=shape.num_pages, max_rows=shape.num_rows, max_order=largest)
    raise ValueError(f"family: must be paged, chunks or buddy, got {shape.family!r}")


def init_state(shape: Shape, run: Run, bin_seconds: float = 1.0) -> State:
    """Nothing has arrived."""
    K, Q, T = shape.num_slots, shape.num_requests, shape.num_tenants

    def full(num: int, value: Any, dtype: Any = jnp.int32) -> jax.Array:
        return jnp.full(num, value, dtype)

    def scalar(value: Any, dtype: Any = jnp.int32) -> jax.Array:
        return jnp.asarray(value, dtype)

    nan = jnp.full(Q, jnp.nan, jnp.float32)
    return State(
        memory=init_memory(shape),
        now=jnp.zeros(2, jnp.float32),
        iteration=scalar(0),
        slots=Slots(
            request=full(K, Q),
            left=full(K, 0),
            generated=full(K, 0),
            pages=full(K, 0),
            whole=full(K, False, jnp.bool_),
            shared_tail=full(K, False, jnp.bool_),
            ends=full(K, False, jnp.bool_),
            unpublished=full(K, False, jnp.bool_),
            forks=full(K, False, jnp.bool_),
        ),
        requests=Requests(
            status=jnp.where(run.prompt > 0, WAITING, FINISHED).astype(jnp.int32),
            generated=full(Q, 0),
            swapped=full(Q, 0),
            service=full(Q, 0, jnp.float32),
            first_token=nan,
            finish=jnp.array(nan),
            first_admitted=full(Q, -1),
            first_iteration=full(Q, -1),
            last_iteration=full(Q, -1),
            preemptions=full(Q, 0),
            cached=full(Q, 0),
        ),
        refused=scalar(False, jnp.bool_),
        noticed=scalar(0),
        moved=scalar(0),
        host_used=scalar(0),
        swapped_out=scalar(0),
        swapped_in=scalar(0),
        recomputed=scalar(0),
        served=full(T, 0, jnp.float32),
        queued=full(T, False, jnp.bool_),
        last_tenant=scalar(0),
        bin_seconds=scalar(bin_seconds, jnp.float32),
        bins=jnp.zeros((NUM_BINS, len(CHANNELS)), jnp.float32),
        trips=scalar(0),
    )


def is_active(run: Run, state: State) -> jax.Array:
    """bool: something is left to do."""
    return (state.now[0] < run.horizon) & jnp.any(state.requests.status != FINISHED)
