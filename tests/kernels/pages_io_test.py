"""kv_update, copy_pages and init_cache."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pagedjax_kernels import copy_pages, init_cache, kv_update, native_cpu, permute_pages
from pagedjax_kernels.cache import Layout, padded_head_dim
from pagedjax_kernels.compat import storage_dtype
from pagedjax_kernels.kv_update import api as update_api

from tests.kernels.harness import contents, poisoned

DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")
FAST = ["xla"] if native_cpu.why_not() else ["native_cpu", "xla"]
STEP = {"float32": 0, "bfloat16": 2**-8, "float16": 2**-11, "int8": 0.5 / 127, "float8_e4m3fn": 2**-4}


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [(b, d) for b in (*FAST, "reference") for d in DTYPES if (b, d) != ("native_cpu", "float8_e4m3fn")],
)
def test_kv_update_writes_its_slots_and_nothing_else(dtype, backend):
    rng = np.random.default_rng(0)
    cache = poisoned(5, 4, 2, 80, dtype)
    k, v = (rng.normal(size=(6, 2, 80)).astype(np.float32) * 3 for _ in range(2))
    k[1, 0] = 0
    slots = np.array([7, 19, 20, 0, 21, 10])  # 20 and 21 are padding
    run = jax.jit(lambda *a: kv_update(*a, backend=backend))
    after = contents(run(cache, jnp.asarray(k), jnp.asarray(v), jnp.int32(1), jnp.asarray(slots, jnp.int32)))
    real = slots < 20
    for which, x in enumerate((k, v)):
        got = after[1, slots[real], :, which]
        largest = np.abs(x[real]).max(-1, keepdims=True)
        limit = STEP[dtype] * (largest if dtype == "int8" else np.maximum(np.abs(x[real]), largest * 2**-8))
        assert (np.abs(got[..., :80] - x[real]) <= limit * 1.001).all()
        np.testing.assert_array_equal(got[..., 80:], 0)
    untouched = np.ones(20, bool)
    untouched[slots[real]] = False
    assert np.isnan(after[0]).all()
    assert np.isnan(after[1, untouched]).all()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 3e38])
def test_quantised_extremes_stay_finite(dtype, magnitude):
    cache = init_cache(1, 2, 4, 1, 64, dtype)
    x = jnp.asarray(np.linspace(-1, 1, 64), jnp.float32).reshape(1, 1, 64) * magnitude  # auto: native where it can
    got = contents(kv_update(cache, x, x, 0, jnp.asarray([5], jnp.int32)))[0, 5, 0]
    np.testing.assert_allclose(got[0], np.asarray(x)[0, 0], rtol=0, atol=magnitude * 2**-4)


@pytest.mark.skipif("native_cpu" not in FAST, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
@pytest.mark.parametrize("given", ["float32", "bfloat16"])
def test_native_writes_the_same_bits_as_xla(given, dtype):
    """Rounding included: ties, subnormals, what becomes infinite, NaN."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 2, 64)) * np.exp2(rng.integers(-30, 20, (64, 2, 64)))
    x[0, 0, :6] = [1 + 2**-8, 1 + 3 * 2**-8, 70000, -1e-40, 65520, 0.5 + 2**-12]
    if dtype != "int8":
        x[1, 0, :3] = [np.inf, -np.inf, np.nan]
    k = jnp.asarray(x, jnp.float32).astype(given)
    slots = jnp.arange(64, dtype=jnp.int32)
    cache = init_cache(1, 4, 16, 2, 64, dtype)
    native, xla = (kv_update(cache, k, -k, 0, slots, backend=b) for b in ("native_cpu", "xla"))
    a, b = (np.asarray(c.kv_pages).view(c.dtype).astype(np.float32) for c in (native, xla))
    if dtype == "int8":  # XLA multiplies by 1 / 127, so a scale may differ in its last bit, and an element by a tie
        np.testing.assert_allclose(a, b, atol=1)
        assert (a != b).mean() < 1e-3
        np.testing.assert_allclose(native.scales, xla.scales, rtol=2e-7)
    else:
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("backend", ["xla", "reference"])
@pytest.mark.parametrize(("dtype", "platform"), [*((d, "cpu") for d in DTYPES), ("bfloat16", "tpu"), ("int8", "tpu")])
def test_copy_pages_copies_all_layers(dtype, platform, backend):
    rng = np.random.default_rng(0)
    cache = init_cache(3, 6, 4, 1, 64, dtype, platform=platform)
    cache = jax.tree.map(lambda x: jnp.asarray(rng.integers(0, 100, x.shape)).astype(x.dtype), cache)
    run = jax.jit(lambda *a: copy_pages(*a, backend=backend))
    src, dst = jnp.asarray([5, 2, 0, 2], jnp.int32), jnp.asarray([6, 4, 7, 1], jnp.int32)  # 6 and 7 are padding
    after = run(cache, src, dst)
    for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(cache), strict=True):
        new, old = np.asarray(new), np.asarray(old)
        np.testing.assert_array_equal(new[:, [1, 4]], old[:, [2, 2]])
        np.testing.assert_array_equal(new[:, [0, 2, 3, 5]], old[:, [0, 2, 3, 5]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_permute_pages(dtype):
    cache = init_cache(2, 12, 4, 1, 8, dtype)
    cache = jax.tree.map(lambda x: (jnp.arange(x.size) % 100).astype(x.dtype).reshape(x.shape), cache)
    run = jax.jit(permute_pages, donate_argnums=0)
    for seed in range(5):
        before = jax.tree.map(np.asarray, cache)
        src = np.append(0, 1 + np.random.default_rng(seed).permutation(11)).astype(np.int32)
        cache = run(cache, jnp.asarray(src))
        for new, old in zip(jax.tree.leaves(cache), jax.tree.leaves(before), strict=True):
            np.testing.assert_array_equal(new[:, 1:], old[:, src[1:]])
            assert not np.asarray(new[:, 0]).any()  # the page that nobody owns
    with pytest.raises(ValueError, match=r"i32\[12\]"):
        permute_pages(cache, jnp.zeros(3, jnp.int32))


@pytest.mark.smoke
def test_permute_pages_needs_no_second_pool():
    cache = jax.eval_shape(lambda: init_cache(4, 1000, 16, 2, 64, "float32"))
    memory = (
        jax.jit(permute_pages, donate_argnums=0)
        .lower(cache, jax.ShapeDtypeStruct((1000,), jnp.int32))
        .compile()
        .memory_analysis()
    )
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 100


def test_copy_pages_of_nothing():
    cache = init_cache(1, 2, 4, 1, 64, "float32")
    empty = jnp.zeros(0, jnp.int32)
    np.testing.assert_array_equal(copy_pages(cache, empty, empty).kv_pages, cache.kv_pages)


@pytest.mark.skipif("native_cpu" not in FAST, reason="no C++ compiler")
def test_native_does_not_write_packed_scales():
    cache, k = init_cache(1, 3, 8, 1, 64, "int8", platform="tpu"), jnp.zeros((1, 1, 64))
    with pytest.raises(NotImplementedError, match="lie as on TPUs"):
        kv_update(cache, k, k, 0, jnp.zeros(1, jnp.int32), backend="native_cpu")


def test_bad_arguments_are_named():
    cache = init_cache(1, 3, 4, 2, 64, "float32")
    k, slots = jnp.zeros((2, 2, 64)), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match=r"k and v must both be \[T, K, D\]"):
        kv_update(cache, k, k[:1], 0, slots)
    with pytest.raises(ValueError, match="k has 1 KV heads, the cache 2"):
        kv_update(cache, k[:, :1], k[:, :1], 0, slots)
    with pytest.raises(ValueError, match="head dim 65"):
        kv_update(cache, jnp.zeros((2, 2, 65)), jnp.zeros((2, 2, 65)), 0, slots)
    with pytest.raises(ValueError, match=r"slot_mapping must be \[T\] = \(2,\)"):
        kv_update(cache, k, k, 0, slots[:1])
    with pytest.raises(ValueError, match="slot_mapping must be int32"):
        kv_update(cache, k, k, 0, slots.astype(jnp.uint32))
    with pytest.raises(ValueError, match="src and dst must both be"):
        copy_pages(cache, slots, slots[:1])
    with pytest.raises(ValueError, match="must be int32"):
        copy_pages(cache, slots, slots.astype(jnp.uint32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_pages": 0}, "num_pages must be at least 1, got 0"),
        ({"page_size": 512}, r"page_size must be in \[1, 256\], got 512"),
        ({"head_dim": 300}, r"head_dim must be in \[1, 256\], got 300"),
        ({"num_pages": 2**28}, r"at most 2\*\*30 slots"),
        ({"platform": "TPU"}, "platform must be None or one of cpu, gpu, tpu, got 'TPU'"),
        ({"dtype": "int4"}, "dtype must be one of float32, .* got int4"),
    ],
)
def test_init_cache_names_what_is_out_of_range(changes, message):
    arguments = {
        "num_layers": 1, "num_pages": 2, "page_size": 16, "num_kv_heads": 1, "head_dim": 64, "dtype": "int8"
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        init_cache(**{**arguments, **changes})


DIMS = (8, 16, 64, 80, 96, 128, 192, 256)


def test_head_dims_are_padded_at_allocation():
    padded = {d: padded_head_dim(d) for d in DIMS}
    assert padded == {8: 8, 16: 16, 64: 64, 80: 128, 96: 128, 128: 128, 192: 192, 256: 256}


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_pages_as_on_a_tpu(dtype):
    """Rows of 128 or 256: K and V share one where the head dim leaves room, and the type is not disguised."""
    rows = {}
    for dim in DIMS:
        cache = jax.eval_shape(functools.partial(init_cache, 2, 5, 8, 3, dim, dtype, platform="tpu"))
        assert (cache.num_layers, cache.num_pages, cache.page_size, cache.num_kv_heads) == (2, 5, 8, 3)
        assert cache.dtype == cache.kv_pages.dtype == jnp.dtype(dtype)
        assert cache.paired == (dim <= 64)
        assert (dtype == "bfloat16") == (cache.scales is None)
        rows[dim] = (*cache.kv_pages.shape[3:], cache.head_dim)
    pairs = dict.fromkeys((8, 16, 64), (3, 128, 64))
    assert rows == pairs | dict.fromkeys((80, 96, 128), (6, 128, 128)) | dict.fromkeys((192, 256), (6, 256, 256))


@pytest.mark.parametrize(
    ("page_size", "kv_heads", "shape"),
    [
        (16, 1, (1, 128)),
        (16, 3, (1, 128)),
        (16, 8, (2, 128)),
        (24, 8, (4, 128)),
        (64, 5, (8, 128)),
        (16, 64, (16, 128)),
    ],
)
def test_scales_as_on_a_tpu(page_size, kv_heads, shape):
    """Rows that fill tiles, and no slot cut in two; more than 64 heads are left as they are."""
    cache = jax.eval_shape(functools.partial(init_cache, 2, 5, page_size, kv_heads, 64, "int8", platform="tpu"))
    assert cache.scales.shape == (2, 5, *shape)
    wide = jax.eval_shape(functools.partial(init_cache, 1, 2, 8, 65, 64, "int8", platform="tpu"))
    assert wide.scales.shape == (1, 2, 8, 130)
    assert not wide.packed_scales


def test_the_layout_is_no_leaf():
    """It goes through jit, scans and maps as what it is, and two layouts are two types of pytree."""
    pairs, rows = (init_cache(1, 2, 8, 2, 64, "float32", platform=p) for p in ("tpu", "cpu"))
    assert len(jax.tree.leaves(pairs)) == 1
    assert jax.jit(lambda x: x)(pairs).layout is Layout.PAIRS
    assert jax.tree.map(lambda x: x, rows).layout is Layout.ROWS
    assert jax.tree.structure(pairs) != jax.tree.structure(rows)


@pytest.mark.parametrize(
    ("backend", "kv_heads", "dim", "dtype"),
    [
        (b, 3, 64, d)
        for b in (*FAST, "xla_tpu", "reference")
        for d in ("float32", "int8")
        if (b, d) != ("native_cpu", "int8")
    ]
    + [("xla_tpu", 8, 32, "bfloat16"), ("xla_tpu", 3, 128, "float32"), ("xla_tpu", 2, 128, "float8_e4m3fn")],
)
def test_kv_update_writes_the_same_elements_in_every_layout(backend, kv_heads, dim, dtype, monkeypatch):
    """Pairs against rows of the reference, bit for bit; with the slots inside on a TPU (3 heads) and with the heads."""
    serves = [b._replace(why_not=lambda *_: None) if b.name == "xla_tpu" else b for b in update_api.BACKENDS]
    monkeypatch.setattr(update_api, "BACKENDS", serves)
    k, v = (jnp.asarray(np.random.default_rng(i).normal(size=(5, kv_heads, dim)), jnp.float32) for i in range(2))
    slots = jnp.asarray([17, 3, 32, 8, 33], jnp.int32)  # 32 and 33 are padding
    found = []
    for platform, name in (("tpu", backend), ("cpu", "reference")):
        cache = poisoned(4, 8, kv_heads, dim, dtype, platform)
        run = jax.jit(functools.partial(kv_update, backend=name))
        found.append(contents(run(cache, k, v, jnp.int32(1), slots))[..., :dim])
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cache_names_its_dtype_however_it_is_stored(dtype):
    cache = init_cache(1, 2, 4, 1, 64, dtype)
    assert cache.dtype == jnp.dtype(dtype)
    assert cache.kv_pages.dtype == storage_dtype(dtype, jax.default_backend())
    assert (cache.scales is not None) == (dtype in ("int8", "float8_e4m3fn"))
