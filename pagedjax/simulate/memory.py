"""The three families of allocators behind one interface, and how many pages requests need."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pagedjax.pages import Pages, alloc, remap
from pagedjax.pages.baselines import Buddy, Chunks, alloc_chunks, release_buddy, release_chunks
from pagedjax.simulate.state import Shape, Slots

Memory = Pages | Chunks | Buddy


def pages_of(shape: Shape, tokens: jax.Array) -> jax.Array:
    """Logical pages that `tokens` fill."""
    return (tokens + (shape.page_size - 1)) // shape.page_size


def pages_shared(shape: Shape, prompt: jax.Array) -> jax.Array:
    """Pages of the prompt that all samples of a request share for good: the full ones."""
    return prompt // shape.page_size if shape.shares else jnp.zeros_like(prompt)


def pages_total(shape: Shape, prompt: jax.Array, tokens: jax.Array) -> jax.Array:
    """Physical pages of a request whose samples hold `tokens` each."""
    shared = pages_shared(shape, prompt)
    return shared + shape.samples * (pages_of(shape, tokens) - shared)


def free_pages(memory: Memory) -> jax.Array:
    """i32 pages or chunks that could be taken."""
    if isinstance(memory, Pages):
        return memory.num_unowned
    assert isinstance(memory, Chunks)
    return memory.num_free


def take(shape: Shape, memory: Memory, rows: jax.Array, need: jax.Array, most: int) -> Memory:
    """Append pages to rows; the caller knows that they are there.

    Args:
      most: static bound on the sum of `need`.
    """
    if isinstance(memory, Pages):
        return alloc(memory, rows, need, max_total=most)[0]
    assert isinstance(memory, Chunks)
    return alloc_chunks(memory, rows, need)[0]


def give_back(memory: Memory, rows: jax.Array) -> Memory:
    """Release rows, padded with R."""
    if isinstance(memory, Pages):
        return remap(memory, rows, jnp.full_like(rows, memory.max_rows))[0]
    if isinstance(memory, Chunks):
        return release_chunks(memory, rows)[0]
    return release_buddy(memory, rows)[0]


def rows_of(shape: Shape, slots: jax.Array) -> jax.Array:
    """i32[C, samples] rows of slots i32[C]; R or more where the slot is padded."""
    return slots[:, None] * shape.samples + jnp.arange(shape.samples, dtype=jnp.int32)[None, :]


def pick(mask: jax.Array, width: int) -> jax.Array:
    """i32[width] the first true places of mask [K], padded with K."""
    K = mask.shape[0]
    place = jnp.where(mask, jnp.cumsum(mask, dtype=jnp.int32) - 1, width)
    return jnp.full(width, K, jnp.int32).at[place].set(jnp.arange(K, dtype=jnp.int32), mode="drop")


def at(values: jax.Array, index: jax.Array) -> jax.Array:
    """values[index], 0 where the index is padded."""
    return values.at[index].get(mode="fill", fill_value=0)


def occupied(shape: Shape, slots: Slots) -> jax.Array:
    """bool[slots]"""
    return slots.request < shape.num_requests


def held(run_prompt: jax.Array, slots: Slots) -> jax.Array:
    """i32[slots] tokens whose keys and values a slot's first row holds, for slots' prompts i32[slots]."""
    known = run_prompt + slots.generated
    return jnp.where(slots.left > 0, jnp.maximum(known - slots.left, 0), jnp.maximum(known - 1, 0))
