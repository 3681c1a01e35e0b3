"""The prefix index is large enough: whatever the secret, all pages of a full pool are found."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.pages import alloc, init_pages, match, publish

N, S, R, P = 1025, 4, 16, 64


@pytest.fixture(scope="module")
def run():
    def fill_and_find(secret, tokens):
        """Leading pages of each row that are in the index once all N - 1 are owned and published; pages found again."""
        rows, lengths = jnp.arange(R, dtype=jnp.int32), jnp.full(R, P * S, jnp.int32)
        # The same number of rows again, empty, to match into.
        pages = init_pages(
            num_pages=N, page_size=S, max_rows=2 * R, max_pages_per_row=P, secret=(0, 0), num_groups=1
        ).replace(secret=secret)
        pages, ok = alloc(pages, rows, jnp.full(R, P, jnp.int32))
        pages, published = publish(pages, rows, tokens, lengths, jnp.zeros_like(rows))
        _, found = match(pages, rows + R, tokens, lengths, jnp.zeros_like(rows))
        return ok, published, found

    return jax.jit(fill_and_find)


def test_a_full_pool_is_in_the_index(run):
    """8 ways for at most one page a bucket on average: with 4 of them, about every third secret would leave a page out."""
    rng = np.random.default_rng(7)
    for _ in range(50):
        secret = jnp.asarray(rng.integers(0, 2**32, 2, np.uint32))
        tokens = jnp.asarray(rng.integers(0, 10**5, (R, P * S), np.int32))
        ok, published, found = run(secret, tokens)
        assert ok.all()
        np.testing.assert_array_equal(published, P)
        np.testing.assert_array_equal(found, P - 1)  # the last token is left to compute
