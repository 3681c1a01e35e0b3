"""Closed forms of allocation schemes, against allocators that hand out memory one request at a time."""

import itertools
import random

import pytest

from pagedjax.pages import schemes
from pagedjax.pages.capacity import Footprint
from pagedjax.pages.schemes import RequestShape


def buddy_by_splitting(num_blocks, blocks, largest):
    """Requests of `blocks` blocks served by a real buddy allocator with lists of free chunks."""
    free = []
    while num_blocks:
        size = min(largest, 1 << (num_blocks.bit_length() - 1))
        free.append(size)
        num_blocks -= size
    want = 1
    while want < blocks:
        want *= 2
    count = 0
    while fitting := [size for size in free if size >= want]:
        count += 1
        size = min(fitting)
        free.remove(size)
        while size > want:
            size //= 2
            free.append(size)
    return count


def test_buddy_requests_against_an_allocator():
    rng = random.Random(0)
    for _ in range(300):
        num_blocks, tokens = rng.randrange(0, 1200), rng.randrange(1, 2049)
        lost = rng.randrange(16)
        found = schemes.buddy_requests(num_blocks * 16 + lost, tokens)
        assert found == buddy_by_splitting(num_blocks, -(-tokens // 16), largest=128)


def test_requests_of_the_paper():
    # OPT-13B in 12 GiB: 15,728 token slots, 983 blocks of 16. Orca (max) runs exactly 7 requests.
    mean = RequestShape(161, 338)
    assert schemes.buddy_requests(15_728, schemes.reserved_max(mean, 2048)) == 7
    assert schemes.reserved_pow2(mean, 2048) == 161 + 512
    assert schemes.buddy_requests(15_728, schemes.reserved_pow2(mean, 2048)) == 983 // 64
    assert schemes.buddy_requests(15_728, schemes.reserved_oracle(mean, 2048)) == 983 // 32
    # Section 6.1: an output of 25 is taken for 32; a power of two stays as it is; the longest sequence caps it.
    assert schemes.reserved_pow2(RequestShape(10, 25), 2048) == 42
    assert schemes.reserved_pow2(RequestShape(10, 32), 2048) == 42
    assert schemes.reserved_pow2(RequestShape(1000, 600), 2048) == 2024
    assert schemes.reserved_pow2(RequestShape(1000, 1040), 2048) == 2048


def test_chunks_by_counting():
    for pool, total, chunk in itertools.product((0, 99, 4096, 5000), (1, 64, 65, 500), (1, 64, 100)):
        free, count = pool // chunk, 0
        while free >= -(-total // chunk):
            free -= -(-total // chunk)
            count += 1
        assert schemes.chunk_requests(pool, total, chunk) == count


@pytest.mark.parametrize("windows", [(0,), (0, 40), (24, 0, 24)])
def test_pages_by_counting(windows):
    footprint, shape = Footprint(16, windows), RequestShape(50, 37)
    held = [sum(footprint.held(50 + i)) for i in range(37)]
    assert schemes.mean_pages(footprint, shape) * 37 == sum(held)
    assert schemes.paged_requests_on_average(footprint, 200, shape) == 200 * 37 // sum(held)
    most = sum(footprint.most(87, 32))
    assert schemes.paged_requests(footprint, 200, shape, chunk=32) == 200 // most
    if windows == (0,):
        assert most == 6
        assert held[0] == 4
        assert held[-1] == 6


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: RequestShape(0, 5), "prompt"),
        (lambda: RequestShape(5, 0), "output"),
        (lambda: schemes.reserved_max(RequestShape(2000, 49), 2048), "max_len"),
        (lambda: schemes.buddy_requests(-1, 5), "pool_tokens"),
        (lambda: schemes.buddy_requests(100, 0), "reserved_tokens"),
        (lambda: schemes.chunk_requests(100, 5, 0), "chunk_tokens"),
        (lambda: schemes.power_of_two_from(0), "n"),
    ],
)
def test_errors_name_the_argument(call, name):
    with pytest.raises(ValueError, match=name):
        call()
