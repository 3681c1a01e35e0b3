"""Decode on the device until a trap, as a process runs until a page fault, an exit, a system call or its time slice."""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax import lax

from pagedjax.runner.state import EngineState, RowStatus
from pagedjax.runner.step import Params, append, decode_batch, gather, give_back, pages_short, take_pages
from pagedjax.sampling import SampleOutput


class Trap(enum.IntEnum):
    """Why the loop came back. Where several hold, the first of this order is reported."""

    FAULT = 1  # the next step needs more pages than there are; no row was changed by it
    IDLE = 2  # no lane can run on
    FINISHED = 3  # a row ended while requests wait
    HOST = 4  # a row used up its token budget
    STEPS = 5  # end of the time slice


class DecodeReport(struct.PyTreeNode):
    """What the host reads after a loop; K is the largest number of steps of one dispatch."""

    trap: jax.Array  # i32 Trap
    num_steps: jax.Array  # i32 steps run
    appended: jax.Array  # i32[B] tokens each lane got: its column of `samples`, from the top
    status: jax.Array  # i32[B] RowStatus
    num_unowned: jax.Array  # i32 pages left
    num_copies: jax.Array  # i32 pages copied on a first write
    samples: SampleOutput  # each field [K, B, ...]


def _running(state: EngineState, lanes: jax.Array) -> jax.Array:
    return (gather(state.rows.status, lanes) == RowStatus.RUNNING) & (lanes < state.rows.max_rows)


def decode_loop(
    graph: nnx.GraphDef,
    params: Params,
    state: EngineState,
    lanes: jax.Array,
    budgets: jax.Array,
    max_steps: jax.Array,
    leave_on_finish: jax.Array,
    *,
    buffer_steps: int,
    backend: str,
    windows: tuple[int, ...] = (0,),
    chunk_pages: int = 1,
) -> tuple[EngineState, DecodeReport]:
    """Run the lanes, one token each a step, until a trap.

    Args:
      lanes: i32[B] rows in arrival order, each with all but its last known token computed; padded with R.
      budgets: i32[B] tokens each lane may generate before the host must look at it (at its text, say).
      max_steps: i32, at most buffer_steps.
      leave_on_finish: bool; requests wait for the room of a row that ends.
      buffer_steps: K, static size of the report.
      windows: static, of each layer group; pages behind them are given back as the lanes go on.
      chunk_pages: static, pages by which a row grows.

    Returns:
      state (donated), DecodeReport.
    """
    model = nnx.merge(graph, params)

    def trap_of(state: EngineState, step: jax.Array, appended: jax.Array) -> jax.Array:
        """0 where the next step may run."""
        running = _running(state, lanes)
        active = running & (appended < budgets)
        status = gather(state.rows.status, lanes)
        ended = (status == RowStatus.STOPPED) | (status == RowStatus.FULL)
        starts, q_lens = gather(state.rows.num_computed, lanes), active.astype(jnp.int32)
        _, short = pages_short(state.pages, lanes, starts, q_lens, chunk_pages)
        trap = jnp.where(step >= max_steps, Trap.STEPS, 0)
        trap = jnp.where((running & ~active).any(), Trap.HOST, trap)
        trap = jnp.where(ended.any() & leave_on_finish, Trap.FINISHED, trap)
        trap = jnp.where(~active.any(), Trap.IDLE, trap)
        return jnp.where(short, Trap.FAULT, trap).astype(jnp.int32)

    def body(carry):
        state, step, appended, num_copies, buffers, _ = carry
        active = _running(state, lanes) & (appended < budgets)
        starts = gather(state.rows.num_computed, lanes)
        q_lens = active.astype(jnp.int32)
        need, _ = pages_short(state.pages, lanes, starts, q_lens, chunk_pages)
        pages, cache, ok, copied = take_pages(
            state.pages, state.cache, lanes, starts, q_lens, need, num_tokens=lanes.shape[0], chunk_pages=chunk_pages
        )
        active = active & ok
        batch = decode_batch(pages, state.rows, lanes, active, backend)
        hidden, cache = model(batch, cache)
        logits = model.logits(hidden)
        num_computed = state.rows.num_computed.at[lanes].add(active.astype(jnp.int32), mode="drop")
        rows, out = append(state.rows.replace(num_computed=num_computed), lanes, active, logits)
        pages = give_back(pages, lanes, gather(num_computed, lanes), windows)
        state = EngineState(pages=pages, cache=cache, rows=rows)
        # An inert lane stays inert, so a lane's tokens are the first `appended` of its column.
        buffers = jax.tree.map(lambda buffer, value: buffer.at[step].set(value), buffers, out)
        appended = appended + active.astype(jnp.int32)
        return state, step + 1, appended, num_copies + copied, buffers, trap_of(state, step + 1, appended)

    pages = give_back(state.pages, lanes, gather(state.rows.num_computed, lanes), windows)
    state = state.replace(pages=pages)
    buffers = _empty_samples(state, lanes, buffer_steps)
    appended = jnp.zeros_like(lanes)
    carry = (state, jnp.int32(0), appended, jnp.int32(0), buffers, trap_of(state, jnp.int32(0), appended))
    state, step, appended, num_copies, buffers, trap = lax.while_loop(lambda c: c[-1] == 0, body, carry)
    return state, DecodeReport(
        trap=trap,
        num_steps=step,
        appended=appended,
        status=gather(state.rows.status, lanes),
        num_unowned=state.pages.num_unowned,
        num_copies=num_copies,
        samples=buffers,
    )


def _empty_samples(state: EngineState, lanes: jax.Array, steps: int) -> SampleOutput:
    """Zeros of the shape of `steps` samples."""
    logits = jax.ShapeDtypeStruct((lanes.shape[0], state.rows.token_counts.shape[1]), jnp.float32)
    one = jax.eval_shape(lambda rows, x: append(rows, lanes, lanes < 0, x)[1], state.rows, logits)
    return jax.tree.map(lambda s: jnp.zeros((steps, *s.shape), s.dtype), one)
