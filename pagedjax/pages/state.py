"""The arrays that page management consists of, their initial value, and statistics over them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

NULL_PAGE = 0
"""The physical page that nobody owns, for tables where there is none. Padded reads may touch it, nothing writes it."""

NO_TOKEN = -1
"""Equal to no token id."""

MAX_PAGES = 2**28
"""Most physical pages: queue positions are 31 bits, and the ring holds at least two entries a page."""


class Pages(struct.PyTreeNode):
    """All metadata of the paged KV cache. Every verb is `verb(pages, ...) -> (pages, result)`; donate the old value.

    G groups, R rows, P logical pages a row, N physical pages (page 0 is NULL_PAGE), S page size, Q ring entries, Bk x W
    index ways.

    A page is *owned* while its count is above zero. An unowned page sits in the queue exactly once: there is one *live*
    entry for it, the one whose position its stamp names. A page without owner is *cached* if it is published, else
    *free*.
    """

    table: jax.Array  # i32[G, R, P] physical page of each logical page, NULL_PAGE where none or where it was given back
    num_pages: jax.Array  # i32[R] logical pages of the row, in all G groups: columns below it are or were in use
    ref_counts: jax.Array  # i32[N] table entries that point at the page, plus pins
    queue: jax.Array  # i32[Q] ring of page ids, position p in slot p % Q; Q a power of two, at least 2 N
    head: jax.Array  # u32 position that is taken next
    tail: jax.Array  # u32 position that is filled next; both wrap, tail - head <= Q
    stamp: jax.Array  # u32[N] 2 x (position of the page's live entry) + 1 if unowned, 0 if owned (and for NULL_PAGE)
    num_unowned: jax.Array  # i32 pages that `alloc` could take
    generation: jax.Array  # u32[N] how often the page was taken
    parent: jax.Array  # i32[N] 0 unpublished; else the page before it in its chain; for a first page N + namespace
    parent_generation: jax.Array  # u32[N] generation of the parent when the link was made; 0 for a first page
    hash: jax.Array  # u32[N] prefix hash of a published page: says in which bucket it is
    tokens: jax.Array  # i32[N, S] token ids of a published page; NO_TOKEN behind the last one of an unfilled page
    buckets: jax.Array  # i32[Bk, W] pages whose hash falls into the bucket; entries of pages that moved on are stale
    children: jax.Array  # i32[Bk, W] pages by the hash of what comes before them: some of those that continue it
    secret: jax.Array  # u32[2] seeds the prefix hash, so that clients cannot aim at a bucket
    hash_bits: int = struct.field(pytree_node=False, default=32)  # bits of the hash that are kept; fewer only in tests

    @property
    def page_size(self) -> int:
        """S, tokens in a page."""
        return self.tokens.shape[-1]

    @property
    def total_pages(self) -> int:
        """N, NULL_PAGE included."""
        return self.ref_counts.shape[-1]

    @property
    def max_rows(self) -> int:
        """R; also the index of a padded row."""
        return self.table.shape[-2]

    @property
    def max_pages_per_row(self) -> int:
        """P."""
        return self.table.shape[-1]

    @property
    def num_groups(self) -> int:
        """G."""
        return self.table.shape[-3]


class PageStats(NamedTuple):
    """Pages by state, i32 each; they add up to N - 1."""

    free: jax.Array  # no owner, no content
    active: jax.Array  # in one table
    shared: jax.Array  # in a table, and counted more than once
    cached: jax.Array  # no owner, content kept for a future prefix hit
    pending: jax.Array  # in no table, but pinned by a copy or report in flight


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def init_pages(
    *,
    num_pages: int,
    page_size: int,
    max_rows: int,
    max_pages_per_row: int,
    num_groups: int = 1,
    secret: Sequence[int] | None = None,
    hash_bits: int = 32,
    num_buckets: int | None = None,
    num_ways: int = 8,
) -> Pages:
    """All pages free, all rows empty; pages will be taken in the order 1, 2, 3, ...

    Args:
      num_pages: N, at least 2: page 0 is reserved, N - 1 are usable.
      page_size: S, tokens in a page.
      max_rows: R, sequences at once.
      max_pages_per_row: P, longest sequence in pages.
      num_groups: G, layer groups with a table each.
      secret: two 32-bit words that seed the prefix hash; None draws them from the operating system.
      hash_bits: for tests, 1..32: a short hash forces collisions.
      num_buckets: Bk, a power of two; None: the first one from N on, so that the index is at most 1 / W full.
      num_ways: W, pages that one bucket can hold. With 8, a full index of random hashes has about one bucket in a million
        that is too small; with 4 it would be one in 300. A page that finds no place breaks its chain there.

    Raises:
      ValueError: a size out of range.
    """
    N, Q = num_pages, power_of_two(2 * num_pages)
    Bk = power_of_two(N) if num_buckets is None else num_buckets
    for name, value, low, high in (
        ("num_pages", N, 2, MAX_PAGES),
        ("page_size", page_size, 1, 2**16),
        ("max_rows", max_rows, 1, 2**24),
        ("max_pages_per_row", max_pages_per_row, 1, 2**24),
        ("num_groups", num_groups, 1, 2**10),
        ("hash_bits", hash_bits, 1, 32),
        ("num_buckets", Bk, 1, 2**30),
        ("num_ways", num_ways, 1, 64),
    ):
        if not low <= value <= high:
            raise ValueError(f"{name}: must be in [{low}, {high}], got {value}")
    if Bk & (Bk - 1):
        raise ValueError(f"num_buckets: must be a power of two, got {Bk}")
    entries = num_groups * max_rows * max_pages_per_row
    if entries >= 2**31:
        raise ValueError(f"num_groups x max_rows x max_pages_per_row: must be below 2**31, got {entries}")
    words = np.frombuffer(os.urandom(8), np.uint32) if secret is None else np.asarray(secret, np.uint32)
    page = np.arange(N, dtype=np.uint32)
    queue = np.zeros(Q, np.int32)
    queue[: N - 1] = page[1:]
    # Each array is a buffer of its own: two donated leaves may not share one.
    return Pages(
        table=jnp.zeros((num_groups, max_rows, max_pages_per_row), jnp.int32),
        num_pages=jnp.zeros(max_rows, jnp.int32),
        ref_counts=jnp.zeros(N, jnp.int32),
        queue=jnp.array(queue),
        head=jnp.array(0, jnp.uint32),
        tail=jnp.array(N - 1, jnp.uint32),
        stamp=jnp.array(np.where(page > 0, 2 * (page - 1) + 1, 0).astype(np.uint32)),
        num_unowned=jnp.array(N - 1, jnp.int32),
        generation=jnp.zeros(N, jnp.uint32),
        parent=jnp.zeros(N, jnp.int32),
        parent_generation=jnp.zeros(N, jnp.uint32),
        hash=jnp.zeros(N, jnp.uint32),
        tokens=jnp.zeros((N, page_size), jnp.int32),
        buckets=jnp.zeros((Bk, num_ways), jnp.int32),
        children=jnp.zeros((Bk, num_ways), jnp.int32),
        secret=jnp.array(words),
        hash_bits=hash_bits,
    )


def stats(pages: Pages) -> PageStats:
    """Count pages by state. Reads all of them, O(N + R P): for reports, not for every step."""
    N = pages.total_pages
    uses = jnp.zeros(N, jnp.int32).at[pages.table.reshape(-1)].add(1)
    real = jnp.arange(N, dtype=jnp.int32) != NULL_PAGE
    owned, published = real & (pages.ref_counts > 0), pages.parent != 0

    def count(mask: jax.Array) -> jax.Array:
        return jnp.sum(mask, dtype=jnp.int32)

    return PageStats(
        free=count(real & ~owned & ~published),
        active=count(owned & (uses > 0) & (pages.ref_counts == 1)),
        shared=count(owned & (uses > 0) & (pages.ref_counts > 1)),
        cached=count(real & ~owned & published),
        pending=count(owned & (uses == 0)),
    )
