"""The Mosaic GPU kernel, for Hopper: one program computes one tile of a row's queries over one split of its keys."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pagedjax_kernels.paged_attention.pallas_gpu_plan import BLOCK, LOG2_E, ROWS, Plan, Span, Tables, span_of


def scratch(plan: Plan, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers. How the memory is tiled and swizzled follows from what the products take."""
    groups, stages = plan.warpgroups, plan.stages
    pages = BLOCK // plan.page
    return {
        "queries": plgpu.SMEM((groups, ROWS, plan.width), dtype),
        "keys": plgpu.SMEM((stages, BLOCK, plan.width), dtype),
        "values": plgpu.SMEM((stages, plan.chunks, BLOCK, plan.chunk), dtype),
        "weights": plgpu.SMEM((groups, ROWS, BLOCK), dtype),
        "result": plgpu.SMEM((groups, ROWS, plan.chunk), jnp.float32),
        "state": plgpu.SMEM((groups, 2, ROWS), jnp.float32),
        "queries_here": plgpu.Barrier(num_barriers=groups),
        "keys_here": plgpu.Barrier(num_arrivals=pages, num_barriers=stages),
        "values_here": plgpu.Barrier(num_arrivals=pages * plan.chunks, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        "zeroed": plgpu.Barrier(num_arrivals=groups),
    }


def attention_kernel(
    scalars: Any,
    row: Any,
    first: Any,
    count: Any,
    pages: Any,
    q: Any,
    pool: Any,
    acc: Any,
    sums: Any,
    *,
    plan: Plan,
    **smem: Any,
) -> None:
    """Grid (K, tiles, splits), with warpgroups + 1 threads.

    Args:
      scalars, row, first, count, pages: see Tables.
      q: [tiles, K, warpgroups, rows, D].
      pool: [L, N * parts, page, 2K, D].
      acc: f32[tiles, K, splits, warpgroups, rows, D], sum of the weighted values.
      sums: f32[tiles, K, splits, warpgroups, 2, rows], the largest score in base 2 and the sum of the weights. Splits that
        a tile does not have are left unwritten.
      smem: see scratch.
    """
    tables = Tables(scalars, row, first, count, pages)
    head, tile, split = (lax.axis_index(name) for name in ("head", "tile", "split"))
    thread = lax.axis_index("thread")
    span = span_of(tables.first[tile], tables.count[tile], tables.scalars[1], plan)
    start = span.origin + split * span.size
    stop = jnp.minimum(start + span.size, span.end)
    blocks = lax.div(stop - start + (BLOCK - 1), jnp.int32(BLOCK))

    @pl.when((start < stop) & (thread == plan.warpgroups))
    def _() -> None:
        if plan.warpgroups > 1:
            plgpu.set_max_registers(40, action="decrease")
        _copy_pages(tables, tile, head, span, start, blocks, pool, smem, plan)

    @pl.when((start < stop) & (thread < plan.warpgroups))
    def _() -> None:
        if plan.warpgroups > 1:  # three have 168 each: too few here, and more than it takes to copy
            plgpu.set_max_registers(232, action="increase")
        plgpu.copy_gmem_to_smem(
            q.at[tile, head, thread], smem["queries"].at[thread, pl.ds(0, plan.rows)], smem["queries_here"].at[thread]
        )
        plgpu.barrier_wait(smem["queries_here"].at[thread])
        position = tables.first[tile]
        window = tables.scalars[1] if plan.window else None
        state = _attend(position, window, thread, span, start, stop, blocks, smem, plan)
        _write(*state, acc.at[tile, head, split, thread], sums.at[tile, head, split, thread], thread, smem, plan)


def _copy_pages(
    tables: Tables,
    tile: jax.Array,
    head: jax.Array,
    span: Span,
    start: jax.Array,
    blocks: jax.Array,
    pool: Any,
    smem: dict[str, Any],
    plan: Plan,
) -> None:
    """Has the keys and values of all blocks copied, as far ahead as there is room."""
    layer, row = tables.scalars[0], tables.row[tile]
    slots = jnp.int32(plan.page)
    lowest, highest = lax.div(span.begin, slots), lax.div(span.end - 1, slots)

    @pl.loop(0, blocks)
    def _(i: jax.Array) -> None:
        slot = lax.rem(i, jnp.int32(plan.stages))

        @pl.when(i >= plan.stages)
        def _() -> None:
            plgpu.barrier_wait(smem["free"].at[slot])

        places = []
        for j in range(BLOCK // plan.page):
            # Beyond what the tile sees a page may be anybody's: the nearest one of its own is taken in its place.
            part = jnp.clip(lax.div(start + i * BLOCK, slots) + j, lowest, highest)
            page = tables.pages[row, lax.div(part, jnp.int32(plan.parts))]
            places.append((layer, page * plan.parts + lax.rem(part, jnp.int32(plan.parts)), slice(None)))
        for j, place in enumerate(places):
            rows = pl.ds(j * plan.page, plan.page)
            plgpu.copy_gmem_to_smem(
                pool.at[(*place, 2 * head)], smem["keys"].at[slot, rows], smem["keys_here"].at[slot]
            )
        for j, place in enumerate(places):
            rows = pl.ds(j * plan.page, plan.page)
            for chunk in range(plan.chunks):
                columns = pl.ds(chunk * plan.chunk, plan.chunk)
                plgpu.copy_gmem_to_smem(
                    pool.at[(*place, 2 * head + 1, columns)],
                    smem["values"].at[slot, chunk, rows],
                    smem["values_here"].at[slot],
                )


def _attend(
    position: jax.Array,
    window: jax.Array | None,
    thread: jax.Array,
    span: Span,
    start: jax.Array,
    stop: jax.Array,
    blocks: jax.Array,
    smem: dict[str, Any],
    plan: Plan,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """A warpgroup's rows over the keys [start, stop): (largest score, sum of weights, sums of values by chunk)."""
    wgmma = plgpu.Layout.WGMMA
    per_row = wgmma.reduce(1)

    def index(axis: int) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, (ROWS, BLOCK), axis, layout=wgmma)

    def body(i: jax.Array, state: tuple) -> tuple:
        top, total, sums = state
        # As if it changed: else addresses in shared memory are kept in registers throughout the loop, and others spilled.
        group = lax.optimization_barrier(thread)
        slot = lax.rem(i, jnp.int32(plan.stages))
        base = start + i * BLOCK
        plgpu.barrier_wait(smem["keys_here"].at[slot])
        scores = pl.run_scoped(
            lambda ref: _product(ref, smem["queries"].at[group], smem["keys"].at[slot].T),
            plgpu.ACC((ROWS, BLOCK), jnp.float32),
        )
        key = index(1)
        seen = (key >= jnp.maximum(start, span.begin) - base) & (key < stop - base)
        if plan.queries > 1:
            at = position - base + lax.div(index(0) + group * ROWS, jnp.int32(plan.group))
            seen &= key <= at
            if window is not None:
                seen &= (window <= 0) | (key > at - window)
        scores = jnp.where(seen, _softened(scores, plan), -jnp.inf)

        new_top = jnp.maximum(top, scores.max(axis=1))
        shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)  # nothing seen so far: -inf - -inf would be NaN
        shrink = jnp.exp2(top - shift)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(shift, scores.shape, [0]))
        total = total * shrink + weights.sum(axis=1)
        smem["weights"].at[group][...] = weights.astype(smem["weights"].dtype)
        plgpu.commit_smem()

        plgpu.barrier_wait(smem["values_here"].at[slot])

        # A slot that nobody wrote may hold NaN, and 0 * NaN is NaN.
        @pl.when((base < span.begin) | (base + BLOCK > stop))
        def _() -> None:
            _zero_unseen(
                smem["values"].at[slot], jnp.maximum(start, span.begin) - base, stop - base, thread, smem, plan
            )

        added = []
        for chunk, part in enumerate(sums):
            product = pl.run_scoped(
                lambda ref, chunk=chunk: _product(ref, smem["weights"].at[group], smem["values"].at[slot, chunk]),
                plgpu.ACC((ROWS, plan.chunk), jnp.float32),
            )
            added.append(part * lax.broadcast_in_dim(shrink, part.shape, [0]) + product)

        @pl.when(i + plan.stages < blocks)  # for later ones nobody waits
        def _() -> None:
            plgpu.barrier_arrive(smem["free"].at[slot])

        return new_top, total, tuple(added)

    state = (
        plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), per_row),
        plgpu.layout_cast(jnp.full((ROWS,), 0, jnp.float32), per_row),
        tuple(plgpu.layout_cast(jnp.full((ROWS, plan.chunk), 0, jnp.float32), wgmma) for _ in range(plan.chunks)),
    )
    return lax.fori_loop(0, blocks, body, state)


def _product(acc: Any, a: Any, b: Any) -> jax.Array:
    plgpu.wgmma(acc, a, b)
    return acc[...]


def _softened(scores: jax.Array, plan: Plan) -> jax.Array:
    """Scores in base 2: scaled, capped if there is a cap, and times log2(e)."""
    if plan.soft_cap is None:
        return scores * (plan.scale * LOG2_E)
    x = scores * (plan.scale / plan.soft_cap)
    e = jnp.exp2(jnp.abs(x) * (-2 * LOG2_E))  # in (0, 1]: never overflows; the chip's own tanh has 11 bits
    tanh = (1 - e) / (1 + e)
    return jnp.where(x < 0, -tanh, tanh) * (plan.soft_cap * LOG2_E)


def _zero_unseen(v: Any, low: jax.Array, high: jax.Array, thread: jax.Array, smem: dict[str, Any], plan: Plan) -> None:
    """Zeroes the rows of a block's values [chunks, 64, chunk] outside [low, high). One warpgroup does it, all wait."""

    @pl.when(thread == 0)
    def _() -> None:
        for chunk in range(plan.chunks):
            row = plgpu.broadcasted_iota(jnp.int32, (BLOCK, plan.chunk), 0, layout=plgpu.Layout.WGMMA)
            values = plgpu.load(v.at[chunk], layout=plgpu.Layout.WGMMA)
            kept = jnp.where((row >= low) & (row < high), values, jnp.zeros_like(values))
            v.at[chunk][...] = kept
        plgpu.commit_smem()

    if plan.warpgroups > 1:
        plgpu.barrier_arrive(smem["zeroed"])
        plgpu.barrier_wait(smem["zeroed"])


def _write(
    top: jax.Array,
    total: jax.Array,
    parts: tuple[jax.Array, ...],
    acc: Any,
    sums: Any,
    thread: jax.Array,
    smem: dict[str, Any],
    plan: Plan,
) -> None:
    """Has a warpgroup's results copied to memory, through shared memory."""
    rows = pl.ds(0, plan.rows)
    smem["state"].at[thread, 0][...] = top
    smem["state"].at[thread, 1][...] = total
    for chunk, part in enumerate(parts):
        smem["result"].at[thread][...] = part
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem["result"].at[thread, rows], acc.at[:, pl.ds(chunk * plan.chunk, plan.chunk)])
        if chunk == 0:
            for i in range(2):
                plgpu.copy_smem_to_gmem(smem["state"].at[thread, i, rows], sums.at[i])
        plgpu.wait_smem_to_gmem(0)
