"""The host tier's index: digests of whole prefixes, holders, and who goes first."""

from __future__ import annotations

import numpy as np

from pagedjax.engine.host_index import DevicePages, HostIndex, chain_digests, group_digest


def digests(tokens, root="a", page_size=4):
    return list(chain_digests(root, np.asarray(tokens, np.int32), page_size))


def test_a_digest_covers_the_whole_past():
    tokens = np.arange(14)
    chain = digests(tokens)
    assert len(chain) == len(set(chain)) == 3  # the last, unfilled page has none
    assert digests(tokens[:8]) == chain[:2]
    for changed in range(12):
        other = tokens.copy()
        other[changed] += 1
        assert [a == b for a, b in zip(digests(other), chain, strict=True)] == [i < changed // 4 for i in range(3)]
    assert not set(digests(tokens, root="b")) & set(chain)
    assert digests(np.tile(np.arange(4), 3))[0] != digests(np.tile(np.arange(4), 3))[1]
    assert digests(tokens[:3]) == []


def test_random_operations_against_a_list():
    """The oracle keeps [digest, page, holders] in order of last use and scans it."""
    rng = np.random.default_rng(0)
    index, oracle = HostIndex(), []
    for step in range(3000):
        kind = rng.choice(["add", "page", "hold", "let_go", "recycle", "forget", "copy"])
        free = [e for e in oracle if e[2] == 0]
        held = [e for e in oracle if e[2] > 0]
        if kind == "add" and len(oracle) < 12:
            index.add(bytes([step % 256, step // 256]), step)
            oracle.append([bytes([step % 256, step // 256]), step, 0])
        elif kind == "page" and oracle:
            entry = oracle[rng.integers(len(oracle))]
            assert index.page(entry[0]) == entry[1]
            if not entry[2]:
                oracle.append(oracle.pop(oracle.index(entry)))
        elif kind == "hold" and oracle:
            entry = oracle[rng.integers(len(oracle))]
            index.hold(entry[0])
            entry[2] += 1
        elif kind == "let_go" and held:
            entry = held[rng.integers(len(held))]
            index.let_go(entry[0])
            entry[2] -= 1
            if not entry[2]:
                oracle.append(oracle.pop(oracle.index(entry)))
        elif kind == "recycle" and free:
            assert index.recycle() == free[0][1]
            oracle.remove(free[0])
        elif kind == "forget" and oracle:
            entry = oracle[rng.integers(len(oracle))]
            assert index.forget(entry[0]) == (None if entry[2] else entry[1])
            if not entry[2]:
                oracle.remove(entry)
        elif kind == "copy":
            index = HostIndex.of(index.entries())
        assert index.num_cached == sum(e[2] == 0 for e in oracle)
        assert all(e[0] in index for e in oracle)
    assert index.page(b"unknown") is None
    assert b"unknown" not in index


def test_groups_have_digests_of_their_own():
    chain = digests(np.arange(40), page_size=1)
    each = [[group_digest(digest, group) for digest in chain] for group in range(3)]
    assert each[0] == chain
    assert len({digest for row in each for digest in row}) == 3 * 40
    # The bytes of a group's number are those of a token, but no chain leads to a group's digest.
    assert digests([5, 1], page_size=1)[1] != group_digest(digests([5], page_size=1)[0], 1)


def test_what_is_known_of_device_pages():
    known = DevicePages([(3, 7, b"a"), (4, 1, b"b")])
    assert (known.content(3, 7), known.content(3, 8), known.content(5, 0)) == (b"a", None, None)
    assert (known.page(b"a"), known.page(b"c")) == ((3, 7), None)
    known.note(3, 8, b"c")
    assert (known.page(b"a"), known.page(b"c"), known.content(3, 7)) == (None, (3, 8), None)
    known.note(5, 2, b"c")  # the same again elsewhere: the last place counts
    known.note(3, 9, b"d")
    assert known.page(b"c") == (5, 2)
    assert known.entries() == [(3, 9, b"d"), (4, 1, b"b"), (5, 2, b"c")]
    known.clear()
    assert (known.entries(), known.page(b"d")) == ([], None)
