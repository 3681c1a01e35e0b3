"""PagedAttention inside somebody's module; norms and products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pagedjax_kernels import init_cache

from pagedjax.nn import Batch, PagedAttention, centered_rms_norm, linear, rms_norm
from tests.oracles import attention_oracle

SIZE, PAGES = 4, 4


def one_row(length: int, new: int, table: list[int]) -> Batch:
    """The last `new` of `length` tokens of one row; its pages in the second of two groups' tables."""
    positions = np.arange(length - new, length)
    pages = np.asarray(table)
    return Batch(
        token_ids=jnp.zeros(new, jnp.int32),
        positions=jnp.asarray(positions, jnp.int32),
        slot_mapping=jnp.asarray(pages[positions // SIZE] * SIZE + positions % SIZE, jnp.int32),
        page_table=jnp.asarray([[[0] * PAGES], [table]], jnp.int32),
        kv_lens=jnp.asarray([length], jnp.int32),
        cu_q_lens=jnp.asarray([0, new], jnp.int32),
        max_q_len=1 if new == 1 else None,
    )


@pytest.mark.smoke
@pytest.mark.parametrize(
    "options",
    [{}, {"scale": 0.2, "soft_cap": 3.0}, {"window": 3}, {"use_sinks": True}, {"use_sinks": True, "window": 3}],
    ids="-".join,
)
def test_chunks_then_decode_equal_the_oracle(options):
    module = PagedAttention(4, 2, 16, **options)
    rng = np.random.default_rng(0)
    if module.sinks is not None:
        module.sinks[...] = jnp.asarray(rng.normal(size=4), jnp.float32)
    graphdef, params = nnx.split(module)

    @jax.jit
    def step(params, q, k, v, cache, batch):
        return nnx.merge(graphdef, params)(q, k, v, cache, jnp.int32(1), batch, group=1)

    q, k, v = (rng.normal(size=(13, heads, 16)).astype(np.float32) for heads in (4, 2, 2))
    cache, got = init_cache(2, 9, SIZE, 2, 16, "float32"), []
    for begin, end in ((0, 5), (5, 11), (11, 12), (12, 13)):
        part = [jnp.asarray(x[begin:end]) for x in (q, k, v)]
        out, cache = step(params, *part, cache, one_row(end, end - begin, [7, 2, 5, 1]))
        got.append(np.asarray(out))
    options = {name: value for name, value in options.items() if name != "use_sinks"}
    sinks = None if module.sinks is None else np.asarray(module.sinks[...])
    want = attention_oracle.attention(q, k, v, sinks=sinks, **options)
    np.testing.assert_allclose(np.concatenate(got), want, atol=2e-6)


def test_a_window_of_the_call_overrides_the_modules():
    module = PagedAttention(2, 2, 16, window=2)
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(6, 2, 16)).astype(np.float32) for _ in range(3))
    cache = init_cache(1, 9, SIZE, 2, 16, "float32")
    arrays = [jnp.asarray(x) for x in (q, k, v)]
    for window, effective in ((None, 2), (0, None), (jnp.int32(3), 3)):
        got, _ = module(*arrays, cache, 0, one_row(6, 6, [7, 2, 5, 1]), group=1, window=window)
        np.testing.assert_allclose(got, attention_oracle.attention(q, k, v, window=effective), atol=2e-6)


def test_a_named_backend_reaches_the_op():
    module = PagedAttention(2, 2, 16)
    x, batch = jnp.zeros((6, 2, 16)), one_row(6, 6, [7, 2, 5, 1]).replace(backend="nonesuch")
    with pytest.raises(ValueError, match="nonesuch"):
        module(x, x, x, init_cache(1, 9, SIZE, 2, 16, "float32"), 0, batch, group=1)


def test_head_counts_must_divide():
    with pytest.raises(ValueError, match="num_heads must be a multiple of num_kv_heads, got 5 and 2"):
        PagedAttention(5, 2, 16)


def test_slots_and_tables_by_group():
    """Two groups with tables of their own over one pool, the group an index in a scan: each reads what it wrote."""
    module = PagedAttention(2, 2, 16)
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 6, 2, 16)).astype(np.float32) for _ in range(3))
    tables = np.array([[7, 2, 0, 0], [5, 3, 0, 0]])
    slots = np.stack([table[np.arange(6) // SIZE] * SIZE + np.arange(6) % SIZE for table in tables])
    batch = one_row(6, 6, [0] * PAGES).replace(
        slot_mapping=jnp.asarray(slots, jnp.int32), page_table=jnp.asarray(tables[:, None], jnp.int32)
    )

    @jax.jit
    def both(cache, q, k, v):
        def layer(cache, xs):
            out, cache = module(*xs[1:], cache, 0, batch, group=xs[0])
            return cache, out

        return jax.lax.scan(layer, cache, (jnp.arange(2, dtype=jnp.int32), q, k, v))[1]

    got = both(init_cache(1, 9, SIZE, 2, 16, "float32"), *(jnp.asarray(x) for x in (q, k, v)))
    for g in range(2):
        np.testing.assert_allclose(got[g], attention_oracle.attention(q[g], k[g], v[g]), atol=2e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_centered_rms_norm(dtype):
    rng = np.random.default_rng(0)
    x, weight = jnp.asarray(rng.normal(size=(3, 64)) * 100, dtype), jnp.asarray(rng.normal(size=64), dtype)
    f = np.asarray(x.astype(jnp.float32), np.float64)
    want = f / np.sqrt((f**2).mean(-1, keepdims=True) + 1e-5) * (1 + np.asarray(weight.astype(jnp.float32)))
    got = centered_rms_norm(x, weight, 1e-5)
    assert got.dtype == x.dtype
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=1e-6 if dtype == "float32" else 2**-8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rms_norm(dtype):
    rng = np.random.default_rng(0)
    x, weight = jnp.asarray(rng.normal(size=(3, 64)) * 100, dtype), jnp.asarray(rng.normal(size=64), dtype)
    f = np.asarray(x.astype(jnp.float32), np.float64)
    want = f / np.sqrt((f**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(weight.astype(jnp.float32))
    got = rms_norm(x, weight, 1e-5)
    assert got.dtype == x.dtype
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=1e-6 if dtype == "float32" else 2**-7)


def test_linear_contracts_and_accumulates_in_float32():
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(5, 2, 3)), rng.normal(size=(2, 3, 4, 7))
    got = linear(jnp.asarray(x, jnp.float32), jnp.asarray(kernel, jnp.float32), num_contracted=2)
    np.testing.assert_allclose(got, np.einsum("tab,abcd->tcd", x, kernel), atol=1e-5)
    wide = linear(jnp.ones((1, 4097), jnp.bfloat16), jnp.ones((4097, 2), jnp.bfloat16))
    assert wide.dtype == jnp.float32
    np.testing.assert_array_equal(wide, 4097)
