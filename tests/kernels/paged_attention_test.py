"""The backends of paged_attention against the numpy oracle."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pagedjax_kernels import init_cache, kv_update, paged_attention
from pagedjax_kernels.hardware import current_hardware
from pagedjax_kernels.paged_attention.api import BACKENDS
from pagedjax_kernels.paged_attention.case import AttentionCase

from tests.kernels.harness import LAYER, make_call

# For outputs of about one. float32: scores reach 20 here, so half their ulp moves a weight by 1e-6 of itself. 16-bit
# queries: half an ulp of the output, and of the weights where a backend rounds them to the queries' dtype.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1.6e-2, "float16": 2e-3}

# What serves here: the native backend needs a CPU and a C++ compiler, Triton's an NVIDIA GPU.
PLAIN = AttentionCase(4, 4, 4, 6, 2, 64, 64, 16, "float32", "float32", None, 0.125, None, "none", False)
FAST = [b.name for b in BACKENDS if b.automatic and b.why_not(current_hardware(), PLAIN) is None]

FACTORS = {
    "page_size": (8, 16, 64, 256),
    "heads": ((1, 1), (1, 8), (2, 3), (4, 1)),  # KV heads, query heads per KV head
    "head_dim": (64, 80, 128, 256),
    "dtype": ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn"),
    "window": (None, "static", "traced", "traced zero"),
    "soft_cap": (None, 2.0),
    "sinks": (False, True),
    "scale": (None, 0.3),
    "kind": ("decode", "mixed"),
}


def pairwise(factors: dict, seed: int = 0) -> list[dict]:
    """Cases in which every value of every factor meets every value of every other. Greedy, and the same every time."""
    rng = np.random.default_rng(seed)
    names = list(factors)

    def pairs(case):
        return {(a, case[a], b, case[b]) for a, b in itertools.combinations(names, 2)}

    missing = {(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]}
    cases = []
    while missing:
        candidates = [{n: v[rng.integers(len(v))] for n, v in factors.items()} for _ in range(60)]
        a, x, b, y = min(missing, key=repr)  # a case that surely helps
        candidates = [{**c, a: x, b: y} for c in candidates]
        best = max(candidates, key=lambda c: len(pairs(c) & missing))
        missing -= pairs(best)
        cases.append(best)
    return cases


def check(call, *, backend="xla", tolerance=None, max_q_len=None, **options):
    window = options.get("window")
    traced = isinstance(window, jax.Array)

    @jax.jit
    def run(args, window, sinks):
        kwargs = {**options, "sinks": sinks, "max_q_len": max_q_len, "backend": backend}
        if traced:
            kwargs["window"] = window
        return paged_attention(*args, **kwargs)

    sinks = options.pop("sinks", None)
    got = np.asarray(run(call.args, window if traced else None, sinks)).astype(np.float32)
    if traced:
        options["window"] = int(window)
    want = call.expected(**options, sinks=sinks)
    assert np.isfinite(got).all()
    np.testing.assert_array_equal(got[int(call.cu_q_lens[-1]) :], 0)
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance or TOLERANCE[call.q.dtype.name])
    return got


def lengths(kind: str, size: int) -> tuple[list[int], list[int]]:
    """(q_lens, kv_lens) with empty rows, one token, and lengths around the page boundary."""
    if kind == "decode":
        return [1, 0, 1, 1, 1, 1], [1, 0, size - 1, size, size + 1, 2 * size + 3]
    return [1, 5, 0, 1, size + 1, 3, 2, size - 1, 1], [
        2 * size,
        5,
        0,
        1,
        size + 1,
        size + 4,
        2 * size + 1,
        size - 1,
        size,
    ]


@pytest.mark.parametrize("case", pairwise(FACTORS), ids=lambda c: "-".join(str(v) for v in c.values()))
@pytest.mark.parametrize("backend", FAST)
def test_fast_backends_equal_the_oracle(backend, case):
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
    check(call, backend=backend, max_q_len=1 if decode else None, **options)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("backend", "dtype", "platform"),
    [(b, d, "cpu") for b in (*FAST, "reference") for d in ("float32", "bfloat16", "int8")]
    + [(b, "float32", "tpu") for b in (*FAST, "reference")]
    + [(b, "int8", "tpu") for b in ("xla", "reference")],
)
def test_backends_on_a_mixed_batch(backend, dtype, platform):
    """On pages as a TPU has them, too: K and V of a head in one row."""
    q_lens, kv_lens = lengths("mixed", 8)
    call = make_call(q_lens, kv_lens, page_size=8, kv_dtype=dtype, platform=platform)
    assert call.cache.paired == (platform == "tpu")
    sinks = jnp.linspace(-1, 1, 6, dtype=jnp.float32)
    check(call, backend=backend, soft_cap=3.0, window=9, sinks=sinks)


def test_reference_on_decode_and_padded_heads():
    check(make_call([1] * 4, [9, 0, 16, 1], head_dim=96, num_tokens=4, page_size=8), backend="reference", max_q_len=1)


def test_16_bit_queries_over_quantised_and_float32_pages():
    """The queries' dtype and the pages' are independent."""
    for kv_dtype in ("int8", "float32"):
        check(make_call([1, 6], [20, 9], kv_dtype=kv_dtype, q_dtype="bfloat16"), tolerance=1.6e-2)


@pytest.mark.parametrize("backend", FAST)
def test_long_rows_cross_blocks_and_tiles(backend):
    """Rows longer than a block of keys, chunks longer than a tile of queries, at the start and with a context."""
    call = make_call([1, 300, 140, 1], [700, 300, 500, 200], num_kv_heads=1, group=2)
    check(call, backend=backend)
    check(call, backend=backend, window=jnp.int32(150))
    check(call, backend=backend, window=3, sinks=jnp.zeros(2, jnp.float32))


@pytest.mark.parametrize("kind", ["mixed", "decode"])
@pytest.mark.parametrize("backend", [*FAST, "reference"])
def test_pages_behind_the_window_are_not_read(backend, kind):
    """Given back, they may hold anything: here page 0, which is poisoned. With sinks, as a streaming model has them."""
    size, window = 8, 13
    q_lens, kv_lens = ([1, 1, 1, 1], [70, 13, 14, 21]) if kind == "decode" else ([1, 9, 40, 21], [70, 60, 41, 21])
    call = make_call(q_lens, kv_lens, page_size=size, num_tokens=4 if kind == "decode" else None)
    table = np.asarray(call.page_table).copy()
    for b, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        table[b, : max(kv_len - q_len - window + 1, 0) // size] = 0
    assert (table[:, 0] == 0).sum() >= 2
    call = dataclasses.replace(call, page_table=jnp.asarray(table))
    for sinks in (None, jnp.linspace(-1, 2, 6, dtype=jnp.float32)):
        check(call, backend=backend, max_q_len=1 if kind == "decode" else None, window=window, sinks=sinks)


@functools.cache
def _jitted(backend, max_q_len):
    return jax.jit(functools.partial(paged_attention, backend=backend, max_q_len=max_q_len))


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("backend", FAST)
def test_random_ragged_batches(backend, seed):
    """One compiled shape, any mixture of rows in it."""
    rng = np.random.default_rng(seed)
    rows, size, max_pages, tokens = 6, 8, 7, 64
    kv_lens = rng.integers(0, 50, rows) * (rng.random(rows) < 0.8)
    q_lens = np.where(rng.random(rows) < 0.5, 1, rng.integers(0, 60, rows))
    q_lens = np.minimum(q_lens, kv_lens)
    while q_lens.sum() > tokens:
        q_lens[np.argmax(q_lens)] //= 2
    call = make_call(
        q_lens.tolist(),
        kv_lens.tolist(),
        page_size=size,
        num_tokens=tokens,
        max_pages=max_pages,
        num_pages=45,
        seed=seed,
    )
    got = np.asarray(_jitted(backend, None)(*call.args))
    np.testing.assert_allclose(got, call.expected(), rtol=0, atol=TOLERANCE["float32"])


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", FAST)
def test_output_does_not_depend_on_batch_mates(backend, dtype):
    """Bit for bit: alone among empty rows, and in a full batch whose other rows are longer and shorter."""
    q_lens, kv_lens = [1, 12, 1, 7, 1], [30, 12, 250, 190, 1]
    call = make_call(q_lens, kv_lens, kv_dtype=dtype)
    together = np.asarray(_jitted(backend, None)(*call.args)).astype(np.float32)
    starts = np.asarray(call.cu_q_lens)
    for b in range(len(q_lens)):
        # The same shapes; all rows but one are empty, and its queries come first.
        q = jnp.roll(call.q, -int(starts[b]), axis=0)
        lens = jnp.where(jnp.arange(5) == b, call.kv_lens, 0)
        cu = jnp.asarray(np.where(np.arange(6) > b, q_lens[b], 0), jnp.int32)
        _, cache, layer, table, _, _ = call.args
        alone = np.asarray(_jitted(backend, None)(q, cache, layer, table, lens, cu)).astype(np.float32)
        np.testing.assert_array_equal(alone[: q_lens[b]], together[starts[b] : starts[b + 1]])


@pytest.mark.parametrize("backend", FAST)
def test_decode_alone_equals_decode_in_a_larger_batch(backend):
    """Bit for bit also over lane counts: 1 lane, and 21 that are cut into groups by their lengths."""
    kv_lens = [30, 1, 250, 190, 64, 65, 0, 3, 128, 0, 17, 100, 41, 9, 77, 260, 2, 33, 150, 31, 16]
    call = make_call([1] * 21, kv_lens, num_tokens=21)
    q, cache, layer, table, lens, _ = call.args
    together = np.asarray(_jitted(backend, 1)(*call.args))
    np.testing.assert_allclose(together, call.expected(), rtol=0, atol=TOLERANCE["float32"])
    one = jnp.arange(2, dtype=jnp.int32)
    for b in (0, 2, 5, 15, 20):
        alone = np.asarray(_jitted(backend, 1)(q[b : b + 1], cache, layer, table[b : b + 1], lens[b : b + 1], one))
        np.testing.assert_array_equal(alone[0], together[b])


@pytest.mark.skipif("native_cpu" not in FAST, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("group", [3, 9])
def test_native_rows_of_several_chunks_do_not_depend_on_the_split(dtype, window, group):
    """Bit for bit: rows alone (split by keys and heads) and in company. And a query alone or beside its row's others, but for
    groups of few queries, which are computed in another order than a prompt's tiles."""
    call = make_call([40, 1, 2, 1], [1300, 1111, 1030, 5], num_kv_heads=2, group=group, kv_dtype=dtype)
    check(call, backend="native_cpu", window=window, tolerance=0.02 if dtype == "bfloat16" else None)
    q, cache, layer, table, lens, cu = call.args
    run = jax.jit(functools.partial(paged_attention, backend="native_cpu", window=window))
    together = np.asarray(run(*call.args)).astype(np.float32)

    def alone(b, first, last):
        """The queries [first, last) of row b, without what comes after them."""
        length, ends = lens[b] - (cu[b + 1] - cu[b]) + last, jnp.array([0, last - first], jnp.int32)
        out = run(q[cu[b] + first : cu[b] + last], cache, layer, table[b : b + 1], length[None], ends)
        return np.asarray(out).astype(np.float32)

    for b in range(4):
        num_queries = int(cu[b + 1] - cu[b])
        np.testing.assert_array_equal(alone(b, 0, num_queries), together[cu[b] : cu[b + 1]])
        for i in (0, num_queries - 1):
            one = alone(b, i, i + 1)[0]
            if group == 9 or num_queries <= 2:
                np.testing.assert_array_equal(one, together[cu[b] + i])
            else:
                np.testing.assert_allclose(one, together[cu[b] + i], rtol=0, atol=TOLERANCE["float32"])


@pytest.mark.skipif("native_cpu" not in FAST, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("page_table must be in", {"page_table": jnp.full((2, 1), 1000, jnp.int32)}),
        ("page_table must be in", {"page_table": jnp.full((2, 1), -1, jnp.int32)}),
        ("kv_lens must be at most P", {"kv_lens": jnp.array([3, 1000], jnp.int32)}),
        ("cu_q_lens must rise", {"cu_q_lens": jnp.array([0, 1, 100], jnp.int32)}),
        ("more queries than tokens", {"kv_lens": jnp.array([3, 4], jnp.int32)}),
        ("layer must be in", {"layer": jnp.int32(2)}),
    ],
)
def test_native_refuses_what_would_read_foreign_memory(message, change):
    names = ("q", "cache", "layer", "page_table", "kv_lens", "cu_q_lens")
    arguments = dict(zip(names, make_call([1, 5], [3, 5], page_size=64).args, strict=True))
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(paged_attention(**{**arguments, **change}, backend="native_cpu"))


@pytest.mark.parametrize("backend", FAST)
def test_scan_over_layers_with_windows_that_differ(backend):
    call = make_call([1, 9], [40, 9])
    cache = call.cache._replace(kv_pages=call.cache.kv_pages.at[0].set(call.cache.kv_pages[LAYER]))
    q, _, _, table, lens, cu = call.args

    @jax.jit
    def layers(cache, windows):
        def body(carry, xs):
            layer, window = xs
            return carry, paged_attention(q, carry, layer, table, lens, cu, window=window, backend=backend)

        return jax.lax.scan(body, cache, (jnp.arange(2, dtype=jnp.int32), windows))[1]

    got = np.asarray(layers(cache, jnp.asarray([0, 5], jnp.int32)))
    np.testing.assert_allclose(got[0], call.expected(), rtol=0, atol=1e-5)
    np.testing.assert_allclose(got[1], call.expected(window=5), rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", FAST)
def test_pool_of_more_than_2_to_31_elements(backend):
    """The last page of a pool whose flat index does not fit 32 bits (2 GiB of int8)."""
    size, kv_heads, dim = 256, 4, 256
    num_pages = 2**31 // (size * 2 * kv_heads * dim) + 2
    cache = init_cache(1, num_pages, size, kv_heads, dim, "int8")
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.normal(size=(3, kv_heads, dim)), jnp.float32) for _ in range(2))
    page = num_pages - 1
    slots = page * size + jnp.arange(3, dtype=jnp.int32)
    cache = jax.jit(kv_update, donate_argnums=0)(cache, k, v, jnp.int32(0), slots)
    q = jnp.asarray(rng.normal(size=(1, kv_heads, dim)), jnp.float32)
    one, table = jnp.arange(2, dtype=jnp.int32), jnp.full((1, 1), page, jnp.int32)
    got = _jitted(backend, 1)(q, cache, jnp.int32(0), table, jnp.full(1, 3, jnp.int32), one)
    scores = np.einsum("hd,thd->ht", q[0], k) * dim**-0.5
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(got[0], np.einsum("ht,thd->hd", weights, v), atol=0.03)


BAD = {
    "q must be [T, H, D]": lambda a: {"q": a["q"][0]},
    "q must be floating": lambda a: {"q": a["q"].astype(jnp.int32)},
    "q has 5 heads": lambda a: {"q": a["q"][:, :5]},
    "q has head dim 192": lambda a: {"q": jnp.zeros((9, 6, 192))},
    "page_table must be [B, P]": lambda a: {"page_table": a["page_table"][0]},
    "kv_lens must be [B] = (2,)": lambda a: {"kv_lens": a["kv_lens"][:1]},
    "cu_q_lens must be [B+1] = (3,)": lambda a: {"cu_q_lens": a["kv_lens"]},
    "kv_lens must be int32": lambda a: {"kv_lens": a["kv_lens"].astype(jnp.float32)},
    "max_q_len must be at least 1, got 0": lambda a: {"max_q_len": 0},
    "max_q_len=1 promises one query a row, got T=9 and B=2": lambda a: {"max_q_len": 1},
    "scale must be finite": lambda a: {"scale": float("nan")},
    "soft_cap must be positive, got 0.0": lambda a: {"soft_cap": 0.0},
    "window must be at least 0 (0: full attention), got -3": lambda a: {"window": -3},
    "window must be a scalar": lambda a: {"window": jnp.zeros(2, jnp.int32)},
    "sinks must be [H] = (6,)": lambda a: {"sinks": jnp.zeros(5)},
    "backend must be 'auto' or one of": lambda a: {"backend": "cuda"},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message):
    q, cache, layer, table, lens, cu = make_call([1, 5], [3, 5]).args
    arguments = {"q": q, "cache": cache, "layer": layer, "page_table": table, "kv_lens": lens, "cu_q_lens": cu}
    with pytest.raises(ValueError, match=re.escape(message)):
        paged_attention(**{**arguments, **BAD[message](arguments)})
