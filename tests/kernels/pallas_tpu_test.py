"""The TPU kernel without a TPU: interpreted against the oracle, with race detection, and lowered to Mosaic."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from pagedjax_kernels import dispatch, init_cache, paged_attention
from pagedjax_kernels.hardware import Hardware
from pagedjax_kernels.paged_attention import api
from pagedjax_kernels.paged_attention.pallas_tpu import paged_attention_pallas_tpu, pool_view
from pagedjax_kernels.paged_attention.pallas_tpu_elements import WORD_ELEMENTS, computed_dtype, unpacked
from pagedjax_kernels.paged_attention.pallas_tpu_limits import why_not_pallas_tpu

from tests.kernels.harness import make_call
from tests.kernels.paged_attention_test import check

# A semaphore that is never signalled would hang for ever, in a callback that no signal interrupts.
pytestmark = pytest.mark.timeout(120, method="thread")


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    """Names a backend "interpreted", with blocks and tiles so small that short rows have several."""

    def run(*args):
        # Memory that nobody wrote holds NaN, and copies arrive no earlier than they are waited for.
        interpret = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
        return paged_attention_pallas_tpu(*args, interpret=interpret, block_tokens=16, tile_queries=8)

    def compiled(*args):
        return paged_attention_pallas_tpu(*args)

    more = [
        dispatch.Backend(n, lambda hardware, case: None, f) for n, f in (("interpreted", run), ("mosaic", compiled))
    ]
    monkeypatch.setattr(api, "BACKENDS", (*api.BACKENDS, *more))


def lengths(kind: str, size: int) -> tuple[list[int], list[int]]:
    """(q_lens, kv_lens): empty rows, one token, lengths around a page's and a block's; a chunk of three tiles."""
    if kind == "decode":
        return [1] * 7, [0, 1, size - 1, size, 0, size + 1, 2 * size + 17]
    return [1, 0, 17, 2, 1, 0], [size + 1, 0, size + 20, 2, 1, size]


CASES = {
    # kind, (KV heads, group), head dim, page size, dtype, options. The heads pick the layout: 2, 4 or 8 rows a slot lie
    # beside one another, other numbers have the slots there; head dim 64 has K and V in one row.
    "decode, 4 rows a slot": ("decode", (2, 1), 128, 8, "float32", {}),
    "decode, 2 rows a slot": ("decode", (1, 8), 128, 16, "bfloat16", {"window": jnp.int32(5), "sinks": True}),
    "decode, 3 pairs": ("decode", (3, 3), 64, 16, "float32", {"window": 9, "soft_cap": 2.0}),
    "decode, 2 pairs": ("decode", (2, 3), 64, 8, "bfloat16", {"scale": 0.3}),
    "mixed, 2 pairs": ("mixed", (2, 3), 64, 8, "float32", {"window": jnp.int32(7)}),
    "mixed, 6 rows a slot": ("mixed", (3, 1), 128, 8, "bfloat16", {"soft_cap": 2.0, "sinks": True}),
    "mixed, long pages": ("mixed", (1, 8), 128, 64, "float32", {"window": 20, "sinks": True}),
    "mixed, window traced as 0": ("mixed", (1, 3), 64, 16, "float32", {"window": jnp.int32(0)}),
    "mixed, head dim 200 in pages of 256": ("mixed", (1, 2), 200, 16, "bfloat16", {}),
    "decode, int8, 3 pairs": ("decode", (3, 2), 64, 16, "int8", {"window": 9, "sinks": True}),
    "mixed, int8, 4 rows a slot": ("mixed", (2, 1), 128, 8, "int8", {"soft_cap": 2.0}),
    "decode, float8, scales in three rows": ("decode", (5, 1), 64, 24, "float8_e4m3fn", {"window": jnp.int32(30)}),
}


@pytest.mark.parametrize("name", CASES)
def test_interpreted_equals_the_oracle(name):
    kind, (kv_heads, group), dim, size, dtype, options = CASES[name]
    q_lens, kv_lens = lengths(kind, size)
    tokens = len(q_lens) if kind == "decode" else None
    call = make_call(
        q_lens,
        kv_lens,
        page_size=size,
        num_kv_heads=kv_heads,
        group=group,
        head_dim=dim,
        kv_dtype=dtype,
        num_tokens=tokens,
        platform="tpu",
    )
    sinks = jnp.linspace(-1, 2, kv_heads * group) if options.get("sinks") else None
    check(call, backend="interpreted", max_q_len=1 if kind == "decode" else None, **{**options, "sinks": sinks})


def test_queries_and_pages_of_different_dtypes():
    """float16 queries, which Mosaic lacks, are widened outside."""
    call = make_call([1, 9], [20, 9], num_kv_heads=1, group=2, kv_dtype="float32", q_dtype="float16", platform="tpu")
    check(call, backend="interpreted")


def test_pages_behind_the_window_are_not_read():
    """Given back, they may hold anything: here page 0, which is poisoned. The window ends within a page."""
    size, window, q_lens, kv_lens = 8, 13, [1, 9, 20, 1], [70, 60, 41, 13]
    call = make_call(q_lens, kv_lens, page_size=size, num_kv_heads=1, group=2, head_dim=64, platform="tpu")
    table = np.asarray(call.page_table).copy()
    for b, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        table[b, : max(kv_len - q_len - window + 1, 0) // size] = 0
    assert (table[:, 0] == 0).sum() == 3
    check(dataclasses.replace(call, page_table=jnp.asarray(table)), backend="interpreted", window=window)


@pytest.mark.parametrize("max_q_len", [1, None])
def test_only_empty_rows(max_q_len):
    call = make_call([0, 0], [0, 0], page_size=8, num_kv_heads=1, group=2, num_tokens=2, platform="tpu")
    call = dataclasses.replace(call, q=jnp.ones_like(call.q))
    run = jax.jit(functools.partial(paged_attention, backend="interpreted", max_q_len=max_q_len))
    np.testing.assert_array_equal(run(*call.args), 0)


def test_output_does_not_depend_on_batch_mates():
    """Bit for bit: alone among empty rows, whose first block nobody fetched ahead, and in a full batch."""
    q_lens, kv_lens = [1, 12, 1], [30, 40, 17]
    call = make_call(q_lens, kv_lens, page_size=8, num_kv_heads=1, group=2, head_dim=64, num_tokens=14, platform="tpu")
    run = jax.jit(functools.partial(paged_attention, backend="interpreted", window=21))
    together, starts = np.asarray(run(*call.args)), np.asarray(call.cu_q_lens)
    for b in range(3):
        q, cache, layer, table, lens, _ = call.args
        cu = jnp.asarray(np.where(np.arange(4) > b, q_lens[b], 0), jnp.int32)
        lens = jnp.where(jnp.arange(3) == b, lens, 0)
        alone = np.asarray(run(jnp.roll(q, -int(starts[b]), axis=0), cache, layer, table, lens, cu))
        np.testing.assert_array_equal(alone[: q_lens[b]], together[starts[b] : starts[b + 1]])


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_every_element_of_a_word(dtype):
    """All patterns of the type, in every place of a 32-bit word, against numpy: subnormal, infinite and NaN, too."""
    bits, count = np.dtype(jnp.dtype(dtype)).itemsize * 8, WORD_ELEMENTS[dtype]
    patterns = np.arange(2**bits).astype(f"uint{bits}")
    words = np.stack([np.roll(patterns, i) for i in range(count)], axis=1)
    loaded = jnp.asarray(words.view(np.uint32)[:, 0])
    for i in range(count):
        want = words[:, i].view(jnp.dtype(dtype)).astype(np.float32)
        np.testing.assert_array_equal(unpacked(loaded, i, dtype), want)
        exact = np.asarray(jnp.asarray(want).astype(computed_dtype(dtype)).astype(jnp.float32))
        np.testing.assert_array_equal(exact, want)


@pytest.mark.parametrize(
    ("shape", "dtype", "minor"),
    [
        ((2, 128), "bfloat16", False),
        ((2, 128), "int8", True),
        ((4, 128), "int8", False),
        ((16, 256), "bfloat16", False),
        ((6, 128), "float32", True),
        ((3, 128), "bfloat16", True),
    ],
)
def test_pool_view(shape, dtype, minor):
    pages = jax.ShapeDtypeStruct((2, 5, 16, *shape), dtype)
    (rows, width), view = shape, jax.eval_shape(lambda x: pool_view(x)[0], pages)
    assert view.shape == ((2, 5, rows, 16, width) if minor else pages.shape)
    assert pool_view(jnp.zeros((1, 1, 8, *shape), dtype))[1] == minor


@pytest.mark.parametrize(("kv_heads", "dim"), [(8, 128), (3, 64), (8, 64), (1, 256)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("max_q_len", [1, None])
def test_lowers_to_mosaic(kv_heads, dim, dtype, max_q_len):
    """Cross-lowered from the CPU, with every option: what Pallas itself refuses. The chip's compiler is not asked."""
    like = jax.ShapeDtypeStruct
    cache = jax.eval_shape(functools.partial(init_cache, 2, 40, 16, kv_heads, dim, dtype, platform="tpu"))
    q, sinks = like((8, 2 * kv_heads, dim), dtype), like((2 * kv_heads,), jnp.float32)
    i32 = functools.partial(like, dtype=jnp.int32)

    @jax.jit
    def run(q, cache, layer, table, lens, cu, sinks, window):
        options = {"soft_cap": 5.0, "sinks": sinks, "window": window, "max_q_len": max_q_len, "backend": "mosaic"}
        return paged_attention(q, cache, layer, table, lens, cu, **options)

    arguments = (q, cache, i32(()), i32((8, 32)), i32((8,)), i32((9,)), sinks, i32(()))
    text = run.trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == (1 if max_q_len == 1 else 2)


CASE = api.AttentionCase(
    num_tokens=8,
    num_rows=8,
    max_pages=4,
    num_heads=6,
    num_kv_heads=2,
    head_dim=128,
    page_head_dim=128,
    page_size=16,
    q_dtype="bfloat16",
    kv_dtype="bfloat16",
    max_q_len=None,
    scale=1.0,
    soft_cap=None,
    window="none",
    sinks=False,
)
TPU = Hardware("tpu", "TPU v5 lite")


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("scales must lie in rows of 128", {"kv_dtype": "int8"}),
        ("int8 pages must have at most 64 KV heads, got 65", {"kv_dtype": "int8", "num_kv_heads": 65}),
        ("Mosaic, takes no float16 arrays", {"kv_dtype": "float16"}),
        ("queries must be float32, bfloat16, float16, got float64", {"q_dtype": "float64"}),
        ("multiples of 128 wide, got 192", {"page_head_dim": 192}),
        ("got 64: allocate them with init_cache(platform='tpu')", {"page_head_dim": 64}),
        ("got 64: allocate", {"page_head_dim": 32, "paired": True}),
        ("page_size must be a multiple of 8, got 4", {"page_size": 4}),
        ("4194304 bytes at most, got 256 * 64 * 128", {"page_size": 256, "num_kv_heads": 32, "kv_dtype": "float32"}),
        ("at most 131072 entries, got 1024 * 129", {"num_rows": 1024, "max_pages": 129}),
    ],
)
def test_refusals_are_named(reason, change):
    assert reason in (why_not_pallas_tpu(TPU, CASE._replace(**change)) or "")


def test_serves_tpus_only_and_before_xla():
    assert why_not_pallas_tpu(TPU, CASE) is None
    assert why_not_pallas_tpu(TPU, CASE._replace(kv_dtype="int8", packed_scales=True)) is None
    names = [b.name for b in api.BACKENDS]
    assert names.index("pallas_tpu") < names.index("xla")
    if jax.default_backend() != "tpu":
        call = make_call([1], [3], num_kv_heads=1, group=1)
        with pytest.raises(NotImplementedError, match=r"'pallas_tpu' cannot serve .*for TPUs only"):
            paged_attention(*call.args, backend="pallas_tpu")
