"""Capacity arithmetic: exact values of the paper and of common models."""

import pytest

from pagedjax.pages import capacity
from pagedjax.pages.capacity import GIB, Footprint

MODELS = {  # layers, heads, head dim, bytes per token in FP16
    "OPT-13B": (40, 40, 128, 819_200),
    "OPT-66B": (64, 72, 128, 2_359_296),
    "OPT-175B": (96, 96, 128, 4_718_592),
    "LLaMA-7B": (32, 32, 128, 512 * 1024),
    "LLaMA-7B, one layer": (1, 32, 128, 16 * 1024),
    "LLaMA-13B": (40, 40, 128, 819_200),
}


@pytest.mark.parametrize("model", MODELS)
def test_bytes_per_token(model):
    layers, heads, dim, expected = MODELS[model]
    assert capacity.bytes_per_token(layers, heads, dim, 2) == expected


def test_bytes_per_page():
    assert capacity.bytes_per_page(1, 32, 128, 2, page_size=16) == 256 * 1024
    assert capacity.bytes_per_page(40, 40, 128, 2, page_size=16) == 13_107_200
    assert 2048 * capacity.bytes_per_token(40, 40, 128, 2) == 1.5625 * GIB
    # One float32 scale per token and head, for K and for V.
    assert capacity.bytes_per_page(2, 3, 64, 1, page_size=16, bytes_per_scale=4) == 16 * 2 * 2 * 3 * (64 + 4)


@pytest.mark.parametrize(
    ("model", "gib", "tokens"), [("OPT-13B", 12, 15_728), ("OPT-66B", 21, 9_557), ("OPT-175B", 264, 60_074)]
)
def test_table_1_of_the_paper(model, gib, tokens):
    assert capacity.pages_that_fit(gib * GIB, MODELS[model][3]) == tokens


def test_pages_of_the_paper():
    pages = capacity.pages_that_fit(12 * GIB, 13_107_200)
    assert pages == 983
    assert pages * 16 == 15_728


def test_cache_memory():
    GB = 10**9
    assert capacity.cache_memory(40 * GB, 26 * GB, 0, 0.9) == 10 * GB
    assert capacity.cache_memory(40 * GB, 26 * GB, 2 * GB) == 12 * GB
    assert capacity.cache_memory(40 * GB, 39 * GB, 2 * GB) == 0
    assert capacity.cache_memory(10, fraction=0.7) == 7  # not 6: 0.7 is meant as seven tenths


def test_concurrent_requests():
    assert capacity.max_concurrent_requests(983, 2048, 16) == 7
    assert capacity.max_concurrent_requests(982, 161 + 338, 16) == 30
    assert capacity.max_concurrent_requests(10, 161, 16) == 0
    # 100 requests with one prefix of 2,000 tokens hold it once: 125 pages, and one or two of their own.
    assert capacity.max_concurrent_requests(125 + 200, 2_032, 16, shared_prefix_tokens=2_000) == 100
    # The last token is never shared, so a request that is all prefix needs a page of its own.
    assert capacity.max_concurrent_requests(124 + 7, 2_000, 16, shared_prefix_tokens=2_000) == 7


def test_capacity_table():
    lines = capacity.capacity_table(982, 16, [1, 512, 2048], shared_prefix_tokens=128)
    assert [line.concurrent_requests for line in lines] == [982, 40, 8]
    assert [line.pages_per_request for line in lines] == [1, 32, 128]
    assert lines[0].usable_tokens == 15_712


def footprint_by_walking(windows, page_size, num_tokens, chunk):
    """Most pages by group that a row holds on its way, page by page, and what it holds in the end."""
    most = [0] * len(windows)
    held = [set() for _ in windows]
    computed = 0
    while computed < num_tokens:
        step = min(chunk, num_tokens - computed)
        for g, pages in enumerate(held):
            pages |= {t // page_size for t in range(computed, computed + step)}
            most[g] = max(most[g], len(pages))
        computed += step
        for pages, window in zip(held, windows, strict=True):
            if window:
                pages -= {p for p in pages if (p + 1) * page_size <= computed - window + 1}
    return tuple(most), tuple(len(pages) for pages in held)


@pytest.mark.parametrize("page_size", [1, 4, 7])
@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_footprint_bounds_what_a_row_holds(page_size, chunk):
    windows = (0, 1, 6, 13)
    footprint = Footprint(page_size, windows)
    reached = [0] * len(windows)
    for num_tokens in range(60):
        most, held = footprint_by_walking(windows, page_size, num_tokens, chunk)
        assert footprint.held(num_tokens) == held
        bound = footprint.most(num_tokens, chunk)
        assert all(a <= b for a, b in zip(most, bound, strict=True)), (num_tokens, most, bound)
        reached = [max(a, b) for a, b in zip(reached, most, strict=True)]
    # The bound of a group without a window is exact, that of the others is off by what alignment does not bring about.
    assert reached[0] == footprint.most(59, chunk)[0] == -(-59 // page_size)
    assert all(b - a <= 1 for a, b in zip(reached, footprint.most(59, chunk), strict=True))


def test_footprint_of_one_group_is_its_pages():
    footprint = Footprint(16)
    assert footprint.held(33) == footprint.most(33, 512) == (3,)
    assert footprint.growth(16, 33, 1) == 2
    assert [footprint.longest(usable, 512, 1000) for usable in (1, 62, 63, 999)] == [16, 992, 1000, 1000]


def test_the_longest_sequence_of_a_hybrid_pool():
    footprint = Footprint(4, (0, 12, 12))
    for usable in range(3, 40):
        longest = footprint.longest(usable, 8, 400)
        assert longest % 4 == 0
        assert sum(footprint.most(longest, 8)) <= usable < sum(footprint.most(longest + 1, 8))
    assert Footprint(4, (12,)).longest(6, 8, 400) == 400
    assert footprint.longest(2, 8, 400) == 0


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: capacity.bytes_per_token(0, 1, 1, 1), "num_layers"),
        (lambda: capacity.bytes_per_token(1, 1, 1, 0.5), "bytes_per_element"),
        (lambda: capacity.bytes_per_page(1, 1, 1, 1, page_size=0), "page_size"),
        (lambda: capacity.cache_memory(-1), "memory_bytes"),
        (lambda: capacity.cache_memory(1, fraction=1.5), "fraction"),
        (lambda: capacity.pages_that_fit(1, 0), "page_bytes"),
        (lambda: capacity.max_concurrent_requests(1, 0, 16), "tokens_per_request"),
        (lambda: capacity.max_concurrent_requests(1, 5, 16, shared_prefix_tokens=6), "shared_prefix_tokens"),
    ],
)
def test_errors_name_the_argument(call, name):
    with pytest.raises(ValueError, match=name):
        call()
