"""The TPU kernel: one program computes one tile of a row's queries, page by page out of the pool in HBM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pagedjax_kernels.paged_attention.pallas_tpu_elements import WORD_ELEMENTS, computed_dtype, unpacked

LANES = 128
# Below every score, and finite: the difference of two of them is 0, not NaN. What a query summed up over keys that it
# may not see is scaled by exp(HIDDEN - score) = 0 at the first key that it sees; a query always sees itself.
HIDDEN = -1e30


class Plan(NamedTuple):
    """What a kernel is specialised on.

    Attributes:
      queries: most queries of a tile.
      group: query heads per KV head.
      heads: KV heads.
      page_size: slots a page.
      max_pages: row stride of the flat page table.
      block_pages: pages that are copied and computed together.
      paired: K and V of a head lie side by side in one row of 128 (head dim 64), else in rows of their own.
      slots_minor: a page arrives as [heads, slots, D], else as [slots, heads, D].
      kv_dtype: of the pages' elements.
      stride: lanes from one slot's scales to the next one's; 0: no scales.
      scale, soft_cap: static floats; soft_cap None is off.
      window, sinks: whether there are any.
      interpret: whether an interpreter runs it.
    """

    queries: int
    group: int
    heads: int
    page_size: int
    max_pages: int
    block_pages: int
    paired: bool
    slots_minor: bool
    kv_dtype: str
    stride: int
    scale: float
    soft_cap: float | None
    window: bool
    sinks: bool
    interpret: bool

    @property
    def rows(self) -> int:
        """Rows of the matmuls: the queries of a tile times the group, in whole sublane tiles."""
        return -(-self.queries * self.group // 8) * 8

    @property
    def block_tokens(self) -> int:
        return self.block_pages * self.page_size

    @property
    def scale_rows(self) -> int:
        """Rows of 128 that a page's scales really fill."""
        return -(-self.page_size * self.stride // LANES)


class Tables(NamedTuple):
    """The scalars that are there before the kernel starts (scalar prefetch): arrays outside, refs in the kernel.

    Attributes:
      scalars: i32[3]: number of tiles in use, layer, window (0: none).
      row: i32[tiles] the row whose queries a tile holds. Tiles in use come first.
      first: i32[tiles] position in its row of a tile's first query.
      end: i32[tiles] position after a tile's last query: what lies from there on is hidden from all of them.
      pages: i32[B * P] the page table.
    """

    scalars: Any
    row: Any
    first: Any
    end: Any
    pages: Any

    def begin(self, tile: jax.Array, plan: Plan) -> jax.Array:
        """The first key that any query of the tile sees."""
        if not plan.window:
            return jnp.int32(0)
        window = self.scalars[2]
        return jnp.where(window > 0, jnp.maximum(self.first[tile] - window + 1, 0), 0)

    def span(self, tile: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array]:
        """(first, past the last) logical page that a tile reads."""
        return lax.div(self.begin(tile, plan), plan.page_size), pl.cdiv(self.end[tile], plan.page_size)


def attention_kernel(
    scalars: Any,
    row: Any,
    first: Any,
    end: Any,
    pages: Any,
    q: Any,
    sinks: Any,
    pool: Any,
    scales: Any,
    out: Any,
    *scratch: Any,
    plan: Plan,
) -> None:
    """q, out [1, K, rows, W] in VMEM; sinks f32[K, rows, 1] in VMEM; in HBM the pool, see `pallas_tpu.pool_view`, and
    the scales f32[L, N, X, 128], which are not read where there are none.

    Scratch, all of it kept from program to program: the blocks buffer [2, ...], that of their scales f32[2, pages, X, 128],
    semaphores [2], the buffer that the program's first block lies in i32[1] (SMEM); the running maximum and sum
    f32[K, rows, 128] and output f32[K, rows, W].
    """
    tables = Tables(scalars, row, first, end, pages)
    buffer, scale_buffer, semaphores, turn, top, total, acc = scratch
    tile, num_tiles = pl.program_id(0), tables.scalars[0]

    def each_page(tile: jax.Array, block: jax.Array, slot: jax.Array, act: Callable[[Any], None]) -> None:
        begin, stop = tables.span(tile, plan)
        begin = begin + block * plan.block_pages
        table = tables.row[tile] * plan.max_pages + begin

        def one(i: jax.Array, carry: None) -> None:
            number = tables.pages[table + i]
            page = pool.at[tables.scalars[1], number]
            if plan.stride:
                of = scales.at[tables.scalars[1], number]
                act(pltpu.make_async_copy(of, scale_buffer.at[slot, i], semaphores.at[slot]))
            slots = pl.ds(pl.multiple_of(i * plan.page_size, plan.page_size), plan.page_size)
            if plan.slots_minor:
                act(pltpu.make_async_copy(page, buffer.at[slot, :, slots], semaphores.at[slot]))
                return
            for lanes in range(buffer.shape[1]):
                part = page.at[:, :, pl.ds(lanes * LANES, LANES)]
                act(pltpu.make_async_copy(part, buffer.at[slot, lanes, slots], semaphores.at[slot]))

        lax.fori_loop(0, jnp.minimum(stop - begin, plan.block_pages), one, None)

    def start(tile: jax.Array, block: jax.Array, slot: jax.Array) -> None:
        each_page(tile, block, slot, lambda copy: copy.start())

    @pl.when((tile == 0) & (num_tiles > 0))
    def _() -> None:
        turn[0] = 0
        start(jnp.int32(0), jnp.int32(0), jnp.int32(0))

    @pl.when(tile < num_tiles)
    def _() -> None:
        begin, stop = tables.span(tile, plan)
        blocks, turned = pl.cdiv(stop - begin, plan.block_pages), turn[0]
        acc[...] = jnp.zeros_like(acc)
        if plan.sinks:
            top[...] = jnp.broadcast_to(sinks[...], top.shape)
            total[...] = jnp.ones_like(total)
        else:
            top[...] = jnp.full_like(top, HIDDEN)
            total[...] = jnp.zeros_like(total)

        def step(block: jax.Array, carry: None) -> None:
            slot = lax.rem(turned + block, 2)
            # The next block, or the first one of the next tile, is on its way while this one is computed.
            last = block + 1 == blocks
            next_tile, next_block = jnp.where(last, tile + 1, tile), jnp.where(last, 0, block + 1)

            @pl.when(next_tile < num_tiles)
            def _() -> None:
                start(next_tile, next_block, 1 - slot)

            each_page(tile, block, slot, lambda copy: copy.wait())
            key = (begin + block * plan.block_pages) * plan.page_size
            _attend(tables, tile, key, q, (buffer.at[slot], scale_buffer.at[slot]), (top, total, acc), plan)

        lax.fori_loop(0, blocks, step, None)
        turn[0] = lax.rem(turned + blocks, 2)
        out[0] = (acc[...] / total[:, :, :1]).astype(out.dtype)


def _attend(tables: Tables, tile: jax.Array, key: jax.Array, q: Any, blocks: Any, state: Any, plan: Plan) -> None:
    """Adds the keys [key, key + block_tokens) to the running softmax of a tile."""
    (block, scale_block), (top, total, acc) = blocks, state
    first, tokens = tables.first[tile], plan.block_tokens
    # What none of the tile's queries sees may be nobody's: it is zeroed, in V too, as 0 * NaN is NaN.
    token = key + lax.broadcasted_iota(jnp.int32, (tokens, acc.shape[-1]), 0)
    owned = (token >= tables.begin(tile, plan)) & (token < tables.end[tile])
    query = first + lax.div(lax.broadcasted_iota(jnp.int32, (plan.rows, tokens), 0), plan.group)
    seen = key + lax.broadcasted_iota(jnp.int32, (plan.rows, tokens), 1)
    visible = seen <= query
    if plan.window:
        window = tables.scalars[2]
        visible &= (window <= 0) | (seen > query - window)

    scales = _token_scales(scale_block, plan) if plan.stride else None
    if scales is not None:
        token = key + lax.broadcasted_iota(jnp.int32, scales.shape, 1)
        scales = jnp.where((token >= tables.begin(tile, plan)) & (token < tables.end[tile]), scales, 0)

    for head in range(plan.heads):
        k, v = _keys_values(block, head, owned, plan)
        queries = q[0, head]
        if queries.dtype != k.dtype:
            queries, k, v = (x.astype(jnp.float32) for x in (queries, k, v))
        scores = _dot(queries, k, 1) * plan.scale
        if scales is not None:
            scores *= scales[2 * head : 2 * head + 1]
        if plan.soft_cap is not None:
            scores = plan.soft_cap * jnp.tanh(scores / plan.soft_cap)
        scores = jnp.where(visible, scores, HIDDEN)
        old = top[head, :, :1]
        new = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
        weights, shrink = jnp.exp(scores - new), jnp.exp(old - new)
        sums = shrink * total[head, :, :1] + jnp.sum(weights, axis=1, keepdims=True)
        top[head] = jnp.broadcast_to(new, top.shape[1:])
        total[head] = jnp.broadcast_to(sums, total.shape[1:])
        if scales is not None:
            weights *= scales[2 * head + 1 : 2 * head + 2]
        acc[head] = shrink * acc[head] + _dot(weights.astype(v.dtype), v, 0)


def _token_scales(block: Any, plan: Plan) -> jax.Array:
    """Scales of a block's pages, [pages, X, 128] in VMEM -> f32[2K or more, tokens]: a row for each head's K, then its V.

    In a page's rows they lie slot after slot. Each page's row goes to all of its tokens; a token keeps the lanes of its own
    slot; a product with ones sorts them by head, exactly.
    """
    values, tokens = block[...], plan.block_tokens
    heads = max(plan.stride, 8)
    number = lax.broadcasted_iota(jnp.int32, (heads, LANES), 0)
    ones = (lax.rem(lax.broadcasted_iota(jnp.int32, (heads, LANES), 1), plan.stride) == number).astype(jnp.float32)
    slot = lax.rem(lax.broadcasted_iota(jnp.int32, (tokens, LANES), 0), plan.page_size)
    lane = lax.broadcasted_iota(jnp.int32, (tokens, LANES), 1)
    out = jnp.zeros((heads, tokens), jnp.float32)
    for row in range(plan.scale_rows):
        spread = jnp.broadcast_to(values[:, row : row + 1], (plan.block_pages, plan.page_size, LANES))
        own = lax.div(row * LANES + lane, plan.stride) == slot
        out += _dot(ones, jnp.where(own, spread.reshape(tokens, LANES), 0), 1)
    return out


def _dot(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """a [m, k] and b, contracted over its `axis`, summed in float32; float32 factors are not rounded to bfloat16."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    numbers = (((1,), (axis,)), ((), ()))
    return lax.dot_general(a, b, numbers, precision=precision, preferred_element_type=jnp.float32)


def _keys_values(block: Any, head: int, owned: jax.Array, plan: Plan) -> list[jax.Array]:
    """The head's K and V [tokens, W] of a block in VMEM, zero where not owned. Paired: the same array twice."""
    rows = [head, head] if plan.paired else [2 * head, 2 * head + 1]
    if plan.slots_minor:
        return [_zeroed(block[row], owned, plan) for row in rows]
    parts = [_strided(block.at[lanes], rows, owned[:, :LANES], plan) for lanes in range(block.shape[0])]
    return [jnp.concatenate(part, axis=1) for part in zip(*parts, strict=True)]


def _strided(block: Any, rows: list[int], owned: jax.Array, plan: Plan) -> list[jax.Array]:
    """[:, row] of a block [tokens, rows, 128] in VMEM, zero where not owned: loads with a stride over sublanes.

    They need 32-bit elements and 128 lanes. The rows are 2i and 2i + 1, or twice the same: in one word, if not float32.
    """
    if plan.interpret:  # an interpreter has no such views of a ref
        return [_zeroed(block[:, row], owned, plan) for row in rows]
    tokens, stride, width = block.shape
    flat, count = block.reshape(tokens * stride, width), WORD_ELEMENTS[plan.kv_dtype]
    if count == 1:
        return [_zeroed(flat[pl.ds(row, tokens, stride)], owned, plan) for row in rows]
    words = flat.bitcast(jnp.uint32)[pl.ds(rows[0] // count, tokens, stride // count)]
    words = jnp.where(owned, words, jnp.uint32(0))  # a zero in every type
    dtype = computed_dtype(plan.kv_dtype)
    return [unpacked(words, row % count, plan.kv_dtype).astype(dtype) for row in rows]


def _zeroed(x: jax.Array, owned: jax.Array, plan: Plan) -> jax.Array:
    return jnp.where(owned, x.astype(jnp.float32), 0).astype(computed_dtype(plan.kv_dtype))
