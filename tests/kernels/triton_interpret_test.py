"""The Triton kernels against the numpy oracle, interpreted: no GPU, and no compiler that could hide what they say."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.util
import multiprocessing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pagedjax_kernels import KVCache, init_cache, tuning
from pagedjax_kernels.copy_pages import triton as copy_backend
from pagedjax_kernels.copy_pages.reference import copy_pages_reference

from tests.kernels import triton_interpreter
from tests.kernels.harness import as_on_a_gpu, make_call
from tests.kernels.paged_attention_test import FACTORS, TOLERANCE, lengths, pairwise
from tests.oracles import attention_oracle

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (extra pagedjax[triton])"
)


@pytest.fixture(scope="module")
def worker():
    """A process whose Triton interprets."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context, triton_interpreter.start) as pool:
        yield lambda fn, *args: pool.submit(fn, *args).result()


def check(call, tolerance=None, **options):
    """In the worker. NaN where nothing was written or foreign slots were read, so finite outputs say something."""
    got = triton_interpreter.attention(call, **options)
    options.pop("max_q_len", None)
    options["window"] = None if options.get("window") is None else int(options["window"])
    assert np.isfinite(got).all()
    np.testing.assert_array_equal(got[int(call.cu_q_lens[-1]) :], 0)
    np.testing.assert_allclose(got, call.expected(**options), rtol=0, atol=tolerance or TOLERANCE[call.q.dtype.name])
    return got


def _case(case: dict) -> None:
    q_lens, kv_lens = lengths(case["kind"], case["page_size"])
    kv_heads, group = case["heads"]
    decode = case["kind"] == "decode"
    call = make_call(
        [1] * len(q_lens) if decode else q_lens,
        kv_lens,
        page_size=case["page_size"],
        num_kv_heads=kv_heads,
        group=group,
        head_dim=case["head_dim"],
        kv_dtype=case["dtype"],
        num_tokens=len(q_lens) if decode else None,
    )
    sinks = jnp.asarray(np.random.default_rng(1).normal(size=kv_heads * group), jnp.float32) if case["sinks"] else None
    window = {None: None, "static": 7, "traced": jnp.int32(21), "traced zero": jnp.int32(0)}[case["window"]]
    options = {"soft_cap": case["soft_cap"], "scale": case["scale"], "sinks": sinks, "window": window}
    check(call, max_q_len=1 if decode else None, **options)


# The same crossing as the other backends have, with smaller pages and heads: interpreting is slow.
SMALL = {**FACTORS, "page_size": (1, 7, 8, 16, 64), "head_dim": (64, 80, 128)}


@pytest.mark.parametrize("case", pairwise(SMALL), ids=lambda c: "-".join(str(v) for v in c.values()))
def test_equals_the_oracle(worker, case):
    worker(_case, case)


def _wide_heads() -> None:
    check(make_call([1, 3], [30, 9], num_kv_heads=1, group=2, head_dim=256, kv_dtype="bfloat16"))
    check(make_call([1, 3], [30, 9], num_kv_heads=1, group=2, head_dim=192))
    check(make_call([1, 3], [30, 9], num_kv_heads=1, group=2, head_dim=16))


def test_narrow_and_wide_heads(worker):
    worker(_wide_heads)


def _mixed_types() -> None:
    for kv_dtype in ("int8", "float32", "float16"):
        check(make_call([1, 6], [20, 9], kv_dtype=kv_dtype, q_dtype="bfloat16"), tolerance=1.6e-2)


def test_queries_and_pages_of_different_types(worker):
    worker(_mixed_types)


def _long_rows() -> None:
    """Several splits, and several tiles of queries; both without and with a context before them."""
    call = make_call([1, 150, 70, 1], [700, 150, 500, 1300], num_kv_heads=1, group=3)
    check(call)
    check(call, window=jnp.int32(150))
    check(call, window=3, sinks=jnp.zeros(3, jnp.float32))
    call = make_call([1, 1], [700, 1300], num_kv_heads=1, group=1, num_tokens=2, max_pages=1024)
    check(call, max_q_len=1, soft_cap=3.0)


def test_long_rows_cross_splits_and_tiles(worker):
    worker(_long_rows)


def _all_splits() -> None:
    """Longer than 32 of the shortest splits: the splits grow."""
    check(make_call([1], [32 * 256 + 65], num_kv_heads=1, group=1, page_size=64, num_tokens=1), max_q_len=1)


def test_splits_grow_with_the_row(worker):
    worker(_all_splits)


def _behind_the_window() -> None:
    size, window = 8, 13
    for q_lens, kv_lens in (([1, 1, 1, 1], [70, 13, 14, 21]), ([1, 9, 40, 21], [70, 60, 41, 21])):
        decode = max(q_lens) == 1
        call = make_call(q_lens, kv_lens, page_size=size, num_tokens=4 if decode else None)
        table = np.asarray(call.page_table).copy()
        for b, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
            table[b, : max(kv_len - q_len - window + 1, 0) // size] = 0  # poison
        assert (table[:, 0] == 0).sum() >= 2
        call = dataclasses.replace(call, page_table=jnp.asarray(table))
        for sinks in (None, jnp.linspace(-1, 2, 6, dtype=jnp.float32)):
            check(call, max_q_len=1 if decode else None, window=window, sinks=sinks)


def test_pages_behind_the_window_are_not_read(worker):
    worker(_behind_the_window)


def _large_pool() -> None:
    """The last page of a pool whose flat index does not fit 32 bits. Only what is touched takes memory."""
    size, kv_heads, dim = 256, 4, 256
    num_pages = 2**31 // (size * 2 * kv_heads * dim) + 2
    pages = np.zeros((1, num_pages, size, 2 * kv_heads, dim), np.int8)
    rng = np.random.default_rng(0)
    pages[0, -1, :3] = rng.integers(-100, 100, pages[0, -1, :3].shape)
    cache = KVCache(pages, np.full(pages.shape[:-1], 0.01, np.float32))  # type: ignore[arg-type]
    k, v = (pages[0, -1, :3, i::2].astype(np.float64) * 0.01 for i in range(2))
    for num_queries in (1, 3):
        q = jnp.asarray(rng.normal(size=(num_queries, kv_heads, dim)), jnp.float32)
        table, lens = np.full((1, 1), num_pages - 1, np.int32), np.full(1, 3, np.int32)
        got = triton_interpreter.run(q, cache, jnp.int32(0), table, lens, np.asarray([0, num_queries], np.int32))
        np.testing.assert_allclose(got, attention_oracle.attention(np.asarray(q), k, v), rtol=0, atol=1e-5)


def test_pool_of_more_than_2_to_31_elements(worker):
    worker(_large_pool)


def _batch_mates() -> None:
    kv_lens = [30, 1, 550, 0, 64, 300]
    call = make_call([1] * 6, kv_lens, num_kv_heads=1, num_tokens=6)
    together = check(call, max_q_len=1)
    one = jnp.arange(2, dtype=jnp.int32)
    for b in (0, 2, 5):
        alone = dataclasses.replace(
            call,
            q=call.q[b : b + 1],
            page_table=call.page_table[b : b + 1, : -(-kv_lens[b] // 16)],
            kv_lens=call.kv_lens[b : b + 1],
            cu_q_lens=one,
        )
        got = triton_interpreter.attention(alone, max_q_len=1)
        np.testing.assert_array_equal(got[0], together[b])


def test_a_row_does_not_depend_on_the_others(worker):
    """Bit for bit, over numbers of rows and widths of the page table."""
    worker(_batch_mates)


def _copies() -> None:
    rng = np.random.default_rng(0)
    for dtype in ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn"):
        for size, dim in ((4, 64), (3, 80)):  # a page of 3 words less than a block, and one of several blocks
            like = jax.eval_shape(lambda s=size, d=dim, t=dtype: init_cache(3, 6, s, 40, d, t))
            cache = jax.tree.map(lambda x: jnp.asarray(rng.integers(0, 100, x.shape).astype(x.dtype)), like)
            cache = as_on_a_gpu(cache)
            src, dst = jnp.asarray([5, 2, 0, 2], jnp.int32), jnp.asarray([6, 4, 7, 1], jnp.int32)  # 6, 7 are padding
            got = copy_backend.copy_pages_triton(cache, src, dst)
            want = copy_pages_reference(cache, src, dst)
            for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                assert x.dtype == y.dtype
                np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))


def test_copies_of_pages(worker):
    worker(_copies)


def _copy_in_a_large_pool() -> None:
    """Pages at both ends of a pool of more than 2^31 words in its last layer. Only what is touched takes memory."""
    size, kv_heads, dim = 256, 4, 256
    num_pages = 2**30 // (size * 2 * kv_heads * dim) + 2
    pages = np.zeros((2, num_pages, size, 2 * kv_heads, dim), np.int32)
    pages[:, -1] = np.random.default_rng(0).integers(1, 100, pages[:, -1].shape)
    launched = []
    from pagedjax_kernels.copy_pages import triton_kernels

    def in_place(kernel, pages, *args, out_shape, grid, in_place, num_warps, **options):
        assert in_place
        tensors = [triton_interpreter.Tensor(np.asarray(x)) for x in (pages, *args, pages)]
        triton_kernels.copy_kernel[grid](*tensors, **options)
        launched.append(kernel)
        return pages

    with pytest.MonkeyPatch.context() as patch:  # without the interpreter's copy of the pool
        patch.setattr(copy_backend, "launch", in_place)
        copy_backend._copy(pages, np.asarray([num_pages - 1], np.int32), np.asarray([num_pages - 2], np.int32))
    assert launched == ["copy_kernel"]
    np.testing.assert_array_equal(pages[:, -2], pages[:, -1])
    assert not pages[:, -3].any()


def test_copies_in_a_pool_of_more_than_2_to_31_words(worker):
    worker(_copy_in_a_large_pool)


def _other_sizes() -> None:
    """Fewer, shorter and longer splits than heuristics make: results, and their independence of the other rows."""
    q_lens, kv_lens = [1, 1, 40, 1], [900, 64, 140, 333]
    call = make_call(q_lens, kv_lens, num_kv_heads=1, num_tokens=43)
    for block, splits, span in ((16, 4, 48), (128, 2, 128)):
        decode = {"block_n": block, "warps": 2, "stages": 2, "splits": splits, "min_span": span}
        prefill = {"block_m": 16, "block_n": block, "warps": 2, "stages": 2}
        with tuning.forced({"triton.decode": decode, "triton.prefill": prefill}):
            together = check(call)
            for b in (0, 3):
                first, one = int(call.cu_q_lens[b]), jnp.arange(2, dtype=jnp.int32)
                alone = dataclasses.replace(
                    call,
                    q=call.q[first : first + 1],
                    page_table=call.page_table[b : b + 1, : -(-kv_lens[b] // 16)],
                    kv_lens=call.kv_lens[b : b + 1],
                    cu_q_lens=one,
                )
                got = triton_interpreter.attention(alone, max_q_len=1)
                np.testing.assert_array_equal(got[0], together[first])


def test_tuned_sizes(worker):
    worker(_other_sizes)
