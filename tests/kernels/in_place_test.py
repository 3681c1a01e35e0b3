"""Nothing in a step copies the pages: the compiler's own account of aliased and temporary memory says so."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from pagedjax_kernels import copy_pages, init_cache, kv_update, native_cpu, paged_attention

FAST = ["xla"] if native_cpu.why_not() else ["native_cpu", "xla"]
LAYERS, PAGES, SIZE, KV_HEADS, DIM, ROWS = 4, 8192, 16, 2, 64, 8


def compiled_memory(run, dtype, max_q_len=1):
    """(pages' bytes, memory analysis) of `run(cache, k, slots, q, step)`; nothing is allocated."""
    cache = jax.eval_shape(lambda: init_cache(LAYERS, PAGES, SIZE, KV_HEADS, DIM, dtype))
    k = jax.ShapeDtypeStruct((ROWS, KV_HEADS, DIM), jnp.float32)
    slots = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    q = jax.ShapeDtypeStruct((ROWS, 2 * KV_HEADS, DIM), jnp.float32)
    compiled = jax.jit(run, donate_argnums=0).lower(cache, k, slots, q).compile()
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    return size, compiled.memory_analysis()


def layers(cache, k, slots, q, max_q_len, backend):
    """Write and attend, layer after layer, the cache in the scan's carry."""
    table = jnp.zeros((ROWS, 4), jnp.int32)
    cu_q_lens = jnp.arange(ROWS + 1, dtype=jnp.int32)

    def body(carry, layer):
        cache, q = carry
        update = "xla" if cache.dtype == jnp.float8_e4m3fn else backend
        cache = kv_update(cache, k, k, layer, slots, backend=update)
        out = paged_attention(q, cache, layer, table, slots, cu_q_lens, max_q_len=max_q_len, backend=backend)
        return (cache, out), None

    return lax.scan(body, (cache, q), jnp.arange(LAYERS, dtype=jnp.int32))[0]


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("backend", FAST)
def test_decode_loop_with_copies_is_in_place(dtype, backend):
    """A while_loop of steps, each with page copies and a scan over layers that write and read."""

    def run(cache, k, slots, q):
        def step(state):
            cache, q, i = state
            cache = copy_pages(cache, slots, slots + i)
            cache, q = layers(cache, k, slots, q, 1, backend)
            return cache, q, i + 1

        return lax.while_loop(lambda s: s[2] < slots[0], step, (cache, q, jnp.int32(0)))

    size, memory = compiled_memory(run, dtype)
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 50


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mixed_step_is_in_place(dtype, backend):
    size, memory = compiled_memory(lambda *a: layers(*a, None, backend), dtype)
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 50


def test_this_test_sees_a_copy():
    """Without the write ahead of the read, XLA copies the pool, and the account shows it."""

    def run(cache, k, slots, q):
        stale = cache.kv_pages[0, slots].astype(jnp.float32).sum()
        return kv_update(cache, k + stale, k, 0, slots, backend="xla"), cache.kv_pages[1, slots]

    size, memory = compiled_memory(run, "float32")
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes > size / 50
