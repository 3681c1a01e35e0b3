"""`check` finds what is broken: each field is damaged in turn."""

import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.pages import check
from tests.pages.small import EMPTY, TEXT, alloc, pages_in_order, pin, publish, remap, unpin


@pytest.fixture(scope="module")
def sound():
    """Row 0: pages 1, 2 published and 3; row 1: a fork of it; row 2: page 4; the rest free."""
    pages, _ = alloc(pages_in_order(), [0, 2], [3, 1])
    pages, _ = publish(pages, [0], [TEXT], [9], [0])
    pages, _ = remap(pages, [1], [0])
    pages, _ = alloc(pages, [3], [1])
    pages, _ = remap(pages, [3], [EMPTY])
    assert check(pages) == []
    return pages


DAMAGE = {
    "a page outside": (lambda p: {"table": p.table.at[0, 3, 0].set(16)}, "outside"),
    "a hole": (lambda p: {"table": p.table.at[0, 2, 0].set(0)}, "lack a page"),
    "a page beyond the end": (lambda p: {"num_pages": p.num_pages.at[2].set(0)}, "beyond num_pages"),
    "too many pages": (lambda p: {"num_pages": p.num_pages.at[2].set(9)}, "num_pages outside"),
    "one page at two places": (lambda p: {"table": p.table.at[0, 2, 0].set(2)}, "different logical pages"),
    "a lost count": (lambda p: {"ref_counts": p.ref_counts.at[1].add(-1)}, "page 1: counted 1 times, but held by 2"),
    "NULL_PAGE counted": (lambda p: {"ref_counts": p.ref_counts.at[0].set(1)}, "NULL_PAGE"),
    "an owned page in the queue": (lambda p: {"stamp": p.stamp.at[4].set(p.stamp[6])}, "owned"),
    "a page lost from the queue": (lambda p: {"stamp": p.stamp.at[6].set(0)}, "not queued"),
    "a wrong sum": (lambda p: {"num_unowned": p.num_unowned + 1}, "num_unowned"),
    "an overlong queue": (lambda p: {"tail": p.tail + 64}, "more than its"),
    "a foreign id in the queue": (lambda p: {"queue": p.queue.at[int(p.head) % 32].set(77)}, "queue holds ids"),
    "an unlisted page": (lambda p: {"buckets": jnp.zeros_like(p.buckets)}, "in no bucket"),
    "a foreign bucket entry": (lambda p: {"buckets": p.buckets.at[0, 0].set(99)}, "bucket names"),
    "changed tokens": (lambda p: {"tokens": p.tokens.at[1, 0].set(77)}, "another hash"),
    "a twin": (
        lambda p: {"parent": p.parent.at[4].set(p.parent[1]), "tokens": p.tokens.at[4].set(p.tokens[1])},
        "same past and content",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(sound, name):
    change, complaint = DAMAGE[name]
    broken = check(sound.replace(**change(sound)))
    assert any(complaint in line for line in broken), broken


def test_a_double_release_is_found(sound):
    pages = unpin(sound, [4])  # row 2 holds it: a count that was not the caller's
    assert any("page 4: counted 0 times, but held by 1" in line for line in check(pages))
    pages, _ = remap(pages, [2], [EMPTY])
    assert any("double release" in line for line in check(pages))
    free = int(np.nonzero(np.asarray(sound.ref_counts) == 0)[0][-1])
    pages = unpin(sound, [free])
    assert any("double release" in line for line in check(pages))


def test_pins_count_as_owners(sound):
    pages = pin(sound, [4, 4, 9])
    assert check(pages, pins=[4, 9, 4]) == []
    assert any("page 9" in line for line in check(pages, pins=[4, 4]))
