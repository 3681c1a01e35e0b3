"""The Triton kernels. Imports triton: only `triton.py` (lazily) and tests import this.

Both attention kernels treat a tile of rows at once, and a tile's row is one query head of one token: the heads of a
group share their KV head's keys, so that a key is read once for all of them. Positions of keys run over the row; the
page that holds one is looked up in the page table. Softmax is online, in float32 and in base 2.

Index arithmetic that multiplies by a page's or a row's stride is in int64: a pool may have more than 2**31 elements.
"""

# mypy: ignore-errors
# (The bodies are Triton, not Python: their names are bound by its compiler.)

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _softened(scores, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr):
    """Scores in base 2: scaled, capped if there is a cap, and times log2(e)."""
    if SOFT_CAP > 0:
        x = scores * (SCALE / SOFT_CAP)
        e = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))  # in (0, 1]: never overflows
        tanh = (1.0 - e) / (1.0 + e)
        scores = tl.where(x < 0, -tanh, tanh) * (SOFT_CAP * LOG2_E)
    else:
        scores = scores * (SCALE * LOG2_E)
    return scores


@triton.jit
def _pages_of(table, key, start, end, wanted, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, ONCE: tl.constexpr):
    """The page of each key of a tile, [BLOCK_N] or a scalar; of keys that are not wanted any page, or 0.

    ONCE: the tile starts at a multiple of BLOCK_N, so that pages whose size divides it, or that it divides, can be looked
    up once and not once for each of their keys: up to a sixth fewer instructions in the loop of a decode kernel.
    """
    if ONCE and PAGE % BLOCK_N == 0:
        page = tl.load(table + start // PAGE)
    elif ONCE and BLOCK_N % PAGE == 0:
        logical = start // PAGE + tl.arange(0, BLOCK_N // PAGE)
        found = tl.load(table + logical, mask=logical * PAGE < end, other=0)
        page = tl.reshape(tl.broadcast_to(found[:, None], [BLOCK_N // PAGE, PAGE]), [BLOCK_N])
    else:
        page = tl.load(table + key // PAGE, mask=wanted, other=0)
    return page


@triton.jit
def _over_keys(
    q,
    position,
    low,
    begin,
    end,
    pages,
    scales,
    table,
    first_page,
    kv_head,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE_D: tl.constexpr,
    PAGE: tl.constexpr,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    QUANTIZED: tl.constexpr,
    IN_F32: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ONCE: tl.constexpr,
):
    """One pass of a tile's queries over the keys at positions [begin, end) of their row.

    Args:
      q: [BLOCK_M, BLOCK_D], zero beyond D. Row m sees the keys at positions [low[m], position[m]].
      begin, end: what some row of the tile sees; the rest is not read, it may belong to others and hold NaN.
      table: pointer to the row's page table. first_page: int64, the layer's first page in the stacked pool.

    Returns:
      (top, total, acc): the largest score [BLOCK_M] in base 2 (-inf where nothing is seen), the sum of the weights, and
      the sum of the weighted values [BLOCK_M, BLOCK_D], all f32.
    """
    dim = tl.arange(0, BLOCK_D)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin // BLOCK_N * BLOCK_N, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        wanted = (key >= begin) & (key < end)
        page = _pages_of(table, key, start, end, wanted, PAGE, BLOCK_N, ONCE)
        head = ((first_page + page) * PAGE + key % PAGE) * (2 * KV_HEADS) + 2 * kv_head  # int64; its value: head + 1
        at = head[:, None] * PAGE_D + dim[None, :]
        inside = wanted[:, None]
        if D < BLOCK_D:
            inside = inside & (dim < D)[None, :]
        k = tl.load(pages + at, mask=inside, other=0.0)
        v = tl.load(pages + at + PAGE_D, mask=inside, other=0.0)
        if IN_F32:
            scores = tl.dot(q, tl.trans(k.to(tl.float32)), input_precision="ieee")
        else:
            scores = tl.dot(q, tl.trans(k.to(q.dtype)))
        if QUANTIZED:
            scores *= tl.load(scales + head, mask=wanted, other=0.0)[None, :]
        seen = (key[None, :] >= low[:, None]) & (key[None, :] <= position[:, None]) & wanted[None, :]
        scores = tl.where(seen, _softened(scores, SCALE, SOFT_CAP), float("-inf"))

        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # nothing seen so far: -inf - -inf would be NaN
        shrink = tl.exp2(top - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weights, 1)
        if QUANTIZED:
            weights *= tl.load(scales + head + 1, mask=wanted, other=0.0)[None, :]
        acc *= shrink[:, None]
        if IN_F32:
            acc += tl.dot(weights, v.to(tl.float32), input_precision="ieee")
        else:
            acc += tl.dot(weights.to(q.dtype), v.to(q.dtype))
        top = new_top
    return top, total, acc


@triton.jit
def _span(length, window, WINDOWED: tl.constexpr, SPLITS: tl.constexpr, MIN_SPAN: tl.constexpr, BLOCK_N: tl.constexpr):
    """How a decode row is split: (first position seen, where split 0 starts, keys in a split, splits).

    It depends on the row alone, so that a row is computed bit for bit alike in every batch.
    """
    begin = 0
    if WINDOWED:
        size = tl.load(window)
        begin = tl.where(size > 0, tl.maximum(length - size, 0), 0)
    origin = begin // BLOCK_N * BLOCK_N
    blocks = tl.cdiv(length - origin, BLOCK_N)
    span = tl.maximum(tl.cdiv(blocks, SPLITS) * BLOCK_N, MIN_SPAN)
    return begin, origin, span, tl.cdiv(length - origin, span)


@triton.jit
def decode_kernel(
    q,
    pages,
    scales,
    layer,
    table,
    kv_lens,
    tokens,
    window,
    part,
    part_top,
    part_total,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE_D: tl.constexpr,
    PAGE: tl.constexpr,
    PAGES: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOWED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    IN_F32: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One split of one row's one query, for the heads of one KV head. Grid (K, B, SPLITS).

    Args:
      q: [T, H, D]. pages: [L, N, S, 2K, PAGE_D]. scales: f32[L, N, S, 2K], or anything where not QUANTIZED.
      layer: i32[1]. table: i32[B, P]. kv_lens: i32[B]. tokens: i32[B], the row's query. window: i32[1] or anything.
      part: f32[B, H, SPLITS, D]. part_top, part_total: f32[B, H, SPLITS]; splits that a row does not have are left
        unwritten.
    """
    kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(kv_lens + row)
    begin, origin, span, _ = _span(length, window, WINDOWED, SPLITS, MIN_SPAN, BLOCK_N)
    start = origin + split * span
    if start >= length:
        return
    group: tl.constexpr = HEADS // KV_HEADS
    m, dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    head = kv_head * group + m
    mask = (m < group)[:, None] & (dim < D)[None, :]
    token = tl.load(tokens + row).to(tl.int64)
    x = tl.load(q + (token * HEADS + head)[:, None] * D + dim[None, :], mask=mask, other=0.0)
    if IN_F32:
        x = x.to(tl.float32)
    everything = tl.zeros([BLOCK_M], tl.int32)
    top, total, acc = _over_keys(
        x,
        everything + (length - 1),
        everything,
        tl.maximum(start, begin),
        tl.minimum(start + span, length),
        pages,
        scales,
        table + row.to(tl.int64) * MAX_PAGES,
        tl.load(layer).to(tl.int64) * PAGES,
        kv_head,
        KV_HEADS,
        D,
        PAGE_D,
        PAGE,
        SCALE,
        SOFT_CAP,
        QUANTIZED,
        IN_F32,
        BLOCK_M,
        BLOCK_N,
        BLOCK_D,
        True,
    )
    at = (row.to(tl.int64) * HEADS + head) * SPLITS + split
    tl.store(part_top + at, top, mask=m < group)
    tl.store(part_total + at, total, mask=m < group)
    tl.store(part + at[:, None] * D + dim[None, :], acc, mask=mask)


@triton.jit
def reduce_kernel(
    part,
    part_top,
    part_total,
    kv_lens,
    window,
    sinks,
    out,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SPAN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The splits of one row's one head put together. Grid (H, B).

    Args:
      part, part_top, part_total: what decode_kernel wrote. kv_lens, window: as there. sinks: f32[H] or anything.
      out: [B, H, D]; zeros for rows of no length.
    """
    head, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(kv_lens + row)
    _, _, _, count = _span(length, window, WINDOWED, SPLITS, MIN_SPAN, BLOCK_N)
    split, dim = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    at = (row.to(tl.int64) * HEADS + head) * SPLITS + split
    tops = tl.load(part_top + at, mask=split < count, other=float("-inf"))
    totals = tl.load(part_total + at, mask=split < count, other=0.0)
    values = tl.load(
        part + at[:, None] * D + dim[None, :], mask=(split < count)[:, None] & (dim < D)[None, :], other=0.0
    )
    top = tl.max(tops, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(tops - top)
    total = tl.sum(totals * weights, 0)
    if SINKS:
        total += tl.exp2(sink - top)
    result = tl.sum(values * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + (row.to(tl.int64) * HEADS + head) * D + dim, result.to(out.dtype.element_ty), mask=dim < D)


@triton.jit
def prefill_kernel(
    q,
    pages,
    scales,
    layer,
    table,
    kv_lens,
    cu_q_lens,
    tile_rows,
    tile_starts,
    window,
    sinks,
    out,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE_D: tl.constexpr,
    PAGE: tl.constexpr,
    PAGES: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    IN_F32: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """BLOCK_Q queries of one row, for the heads of one KV head: BLOCK_Q * G <= BLOCK_M rows. Grid (K, tiles).

    Args:
      As decode_kernel's; cu_q_lens: i32[B+1]. sinks: f32[H] or anything.
      tile_rows: i32[tiles], the row of every tile; ROWS (or more) for a tile that is none. tile_starts: i32[tiles], the
        tile's first query, counted from its row's first.
      out: [T, H, D]; tokens in no tile are left as they are.
    """
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    row = tl.load(tile_rows + tile)
    if row >= ROWS:
        return
    group: tl.constexpr = HEADS // KV_HEADS
    first = tl.load(cu_q_lens + row)
    count = tl.load(cu_q_lens + row + 1) - first
    length = tl.load(kv_lens + row)
    start = tl.load(tile_starts + tile)
    context = length - count

    m, dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    query = start + m // group
    head = kv_head * group + m % group
    real = (m < BLOCK_Q * group) & (query < count)
    mask = real[:, None] & (dim < D)[None, :]
    at = ((first + query).to(tl.int64) * HEADS + head)[:, None] * D + dim[None, :]
    x = tl.load(q + at, mask=mask, other=0.0)
    if IN_F32:
        x = x.to(tl.float32)

    position = tl.where(real, context + query, -1)
    low = tl.zeros([BLOCK_M], tl.int32)
    begin = 0
    if WINDOWED:
        size = tl.load(window)
        low = tl.where(size > 0, tl.maximum(position - size + 1, 0), 0)
        begin = tl.where(size > 0, tl.maximum(context + start - size + 1, 0), 0)
    top, total, acc = _over_keys(
        x,
        position,
        low,
        begin,
        tl.minimum(context + start + BLOCK_Q, length),
        pages,
        scales,
        table + row.to(tl.int64) * MAX_PAGES,
        tl.load(layer).to(tl.int64) * PAGES,
        kv_head,
        KV_HEADS,
        D,
        PAGE_D,
        PAGE,
        SCALE,
        SOFT_CAP,
        QUANTIZED,
        IN_F32,
        BLOCK_M,
        BLOCK_N,
        BLOCK_D,
        False,  # wide tiles have no registers left for it
    )
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        base = tl.maximum(top, sink)
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.exp2(sink - base)
        acc *= shrink[:, None]
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=mask)
