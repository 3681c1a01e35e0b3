"""How the Mosaic GPU kernel cuts a call: tiles, blocks and splits. Plain Python and JAX, no Pallas."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pagedjax_kernels.paged_attention.case import AttentionCase

ROWS = 64
"""Rows of a warpgroup's products: wgmma knows no fewer."""

BLOCK = 64
"""Keys that are computed together."""

MAX_SPLITS = 32
"""Splits of a decode row, at most: what they hand to the reduction is B * K * 32 * rows * (D + 2) floats in memory."""

LOG2_E = math.log2(math.e)


class Plan(NamedTuple):
    """What a kernel is specialised on.

    Attributes:
      queries: most queries of a tile; row m of a tile is head m % group of query m // group.
      group: query heads per KV head.
      heads: KV heads.
      warpgroups: that compute, each 64 rows; one more copies.
      rows: of each warpgroup's 64 that are real, a multiple of 8; the rest is neither read nor written.
      width: the pages' head dim.
      page: slots that are copied at once: a page, or a part of one.
      parts: of those in a page.
      stages: blocks in shared memory.
      splits: most splits of a row. min_span: the fewest keys of one, a multiple of 64.
      scale, soft_cap: static floats; soft_cap None is off.
      window: whether there may be one.
    """

    queries: int
    group: int
    heads: int
    warpgroups: int
    rows: int
    width: int
    page: int
    parts: int
    stages: int
    splits: int
    min_span: int
    scale: float
    soft_cap: float | None
    window: bool

    @property
    def chunk(self) -> int:
        """Columns of V that are multiplied at once: the products of more would not stay in registers."""
        return 128 if self.width % 128 == 0 else 64

    @property
    def chunks(self) -> int:
        return self.width // self.chunk

    def most_tiles(self, case: AttentionCase) -> int:
        """Full tiles, and one more for every row that takes part: two queries at least."""
        return case.num_tokens // self.queries + min(case.num_rows, case.num_tokens // 2)


def decode_plan(case: AttentionCase, min_span: int | None = None) -> Plan:
    """One query a tile, and as many blocks ahead as there is room for: bandwidth is all.

    min_span None: so many keys that the partial sums are 3 % of what is read of the pages, 2 * rows / span.
    """
    rows = -(-case.num_heads // case.num_kv_heads // 8) * 8
    span = min_span or BLOCK * rows
    splits = min(MAX_SPLITS, -(-case.max_pages * case.page_size // span))
    stages = {64: 6, 128: 4, 192: 3, 256: 2}[case.page_head_dim]
    return _plan(case, queries=1, warpgroups=1, rows=rows, stages=stages, splits=splits, min_span=span)


def prefill_plan(case: AttentionCase) -> Plan:
    """Keys shared by two warpgroups' queries, or by one's, where shared memory has no room for two."""
    warpgroups = 2 if case.page_head_dim <= 128 else 1
    queries = warpgroups * ROWS // (case.num_heads // case.num_kv_heads)
    stages = {64: 4, 128: 3, 192: 3, 256: 2}[case.page_head_dim]
    return _plan(case, queries=queries, warpgroups=warpgroups, rows=ROWS, stages=stages, splits=1, min_span=BLOCK)


def _plan(case: AttentionCase, **fields: Any) -> Plan:
    page = math.gcd(case.page_size, BLOCK)
    return Plan(
        group=case.num_heads // case.num_kv_heads,
        heads=case.num_kv_heads,
        width=case.page_head_dim,
        page=page,
        parts=case.page_size // page,
        scale=case.scale,
        soft_cap=case.soft_cap,
        window=case.window != "none",
        **fields,
    )


class Tables(NamedTuple):
    """The integers that say what a tile is: arrays outside, refs in the kernel.

    Attributes:
      scalars: i32[2]: layer, window (0: none).
      row: i32[tiles] the row of pages that a tile looks at.
      first: i32[tiles] position in its row of a tile's first query.
      count: i32[tiles] queries of a tile, 0 for a tile not in use.
      pages: i32[B, P] the page table.
    """

    scalars: Any
    row: Any
    first: Any
    count: Any
    pages: Any


class Span(NamedTuple):
    """The keys of a tile, or of an array of tiles: begin and end are the first that a query sees and the one past the
    last; a split s takes those from origin + s * size on, `size` of them."""

    begin: Any
    end: Any
    origin: Any
    size: Any


def span_of(first: Any, count: Any, window: Any, plan: Plan) -> Span:
    """How a tile's keys are split: by its own positions alone, whatever else is in the call."""
    end = jnp.where(count > 0, first + count, 0)
    begin = jnp.where((window > 0) & (count > 0), jnp.maximum(first - window + 1, 0), 0)
    origin = lax.div(begin, jnp.int32(BLOCK)) * BLOCK
    size = lax.div(end - origin + (plan.splits * BLOCK - 1), jnp.int32(plan.splits * BLOCK)) * BLOCK
    return Span(begin, end, origin, jnp.maximum(size, plan.min_span))
