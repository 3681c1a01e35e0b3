"""A donated verb works in place at a million pages: all of the state is aliased, and scratch memory does not know N."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pagedjax.pages import adopt, alloc, cow, init_pages, match, pin, publish, remap, slide, unpin

N, R, P, S, C = 1_000_000, 64, 64, 16, 16


def abstract(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


STATE = jax.eval_shape(
    functools.partial(init_pages, num_pages=N, page_size=S, max_rows=R, max_pages_per_row=P, secret=(1, 2))
)
ROWS, TEXTS = abstract(C), abstract(C, P * S)


def alloc_and_cow(pages, rows, need, logical):
    """What a decode step does."""
    pages, grown = alloc(pages, rows, need, max_total=C)
    pages, copies, own = cow(pages, rows, logical)
    return pages, copies, grown & own


@pytest.mark.parametrize(
    ("verb", "args"),
    [
        (alloc, (ROWS, ROWS)),
        (remap, (ROWS, ROWS)),
        (alloc_and_cow, (ROWS, ROWS, ROWS)),
        (match, (ROWS, TEXTS, ROWS, ROWS)),
        (adopt, (ROWS, TEXTS, ROWS, ROWS)),
        (publish, (ROWS, TEXTS, ROWS, ROWS)),
        (publish, (ROWS, TEXTS, ROWS, ROWS, jax.ShapeDtypeStruct(ROWS.shape, jnp.bool_))),
        (pin, (ROWS,)),
        (unpin, (ROWS,)),
        (slide, (ROWS, abstract(1, C))),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_nothing_is_copied(verb, args):
    memory = jax.jit(verb, donate_argnums=0).lower(STATE, *args).compile().memory_analysis()
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(STATE))
    assert memory.alias_size_in_bytes >= size - 8  # the secret passes through
    assert memory.temp_size_in_bytes < 1_000_000  # one array of N words would be 4,000,000
