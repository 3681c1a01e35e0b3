"""Which page holds what: full pages by a digest of their whole past, in the host pool and, as far as known, on the device."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Iterable, Iterator

import numpy as np

DIGEST_BYTES = 32


def chain_digests(root: str, token_ids: np.ndarray, page_size: int) -> Iterator[bytes]:
    """A digest for each full page of a sequence, which covers all tokens up to the page's end.

    Unlike the device's prefix hash it decides by itself, so it is a cryptographic one.

    Args:
      root: what the chain belongs to; equal tokens under different roots have different digests.
      token_ids: i32[n].
    """
    digest = hashlib.blake2b(root.encode(), digest_size=DIGEST_BYTES).digest()
    for end in range(page_size, len(token_ids) + 1, page_size):
        page = np.ascontiguousarray(token_ids[end - page_size : end], np.dtype("<i4"))
        digest = hashlib.blake2b(digest + page.tobytes(), digest_size=DIGEST_BYTES).digest()
        yield digest


def group_digest(digest: bytes, group: int) -> bytes:
    """The digest of a page of one layer group, from that of its tokens and all before them. Group 0 keeps that one."""
    if group == 0:
        return digest
    # Personalised: no chain, whatever its tokens, leads to such a digest.
    return hashlib.blake2b(digest + group.to_bytes(4, "little"), digest_size=DIGEST_BYTES, person=b"group").digest()


class HostIndex:
    """Digest -> page. A *held* page belongs to a swapped-out sequence and stays; the others go when room is needed, the
    least recently used first."""

    def __init__(self) -> None:
        self._held: dict[bytes, list[int]] = {}  # [page, holders]
        self._cached: collections.OrderedDict[bytes, int] = collections.OrderedDict()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._held or digest in self._cached

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds."""
        return len(self._cached)

    def page(self, digest: bytes) -> int | None:
        """The page, which counts as used now; None where there is none."""
        if digest in self._held:
            return self._held[digest][0]
        if digest in self._cached:
            self._cached.move_to_end(digest)
            return self._cached[digest]
        return None

    def add(self, digest: bytes, page: int) -> None:
        """A page that nobody holds yet. There must be none with this digest."""
        assert digest not in self, "one page a content"
        self._cached[digest] = page

    def hold(self, digest: bytes) -> None:
        """One holder more."""
        if digest in self._cached:
            self._held[digest] = [self._cached.pop(digest), 0]
        self._held[digest][1] += 1

    def let_go(self, digest: bytes) -> None:
        """One holder less; without any it can be recycled, last of all."""
        entry = self._held[digest]
        entry[1] -= 1
        if entry[1] == 0:
            del self._held[digest]
            self._cached[digest] = entry[0]

    def recycle(self) -> int:
        """Forget the least recently used page that nobody holds, and return it. There must be one."""
        return self._cached.popitem(last=False)[1]

    def forget(self, digest: bytes) -> int | None:
        """Drop a page unless somebody holds it; returns it if it was dropped."""
        return self._cached.pop(digest, None)

    def entries(self) -> list[tuple[bytes, int, int]]:
        """(digest, page, holders) of all, those that are recycled first at the front."""
        return [(d, page, 0) for d, page in self._cached.items()] + [(d, e[0], e[1]) for d, e in self._held.items()]

    @classmethod
    def of(cls, entries: list[tuple[bytes, int, int]]) -> HostIndex:
        """The inverse of `entries`."""
        index = cls()
        for digest, page, holders in entries:
            if holders:
                index._held[digest] = [page, holders]
            else:
                index._cached[digest] = page
        return index


class DevicePages:
    """What is in pages of the device, as far as it was published. They may have been taken for something else since: a page
    holds what is noted here as long as it is of that generation."""

    def __init__(self, entries: Iterable[tuple[int, int, bytes]] = ()) -> None:
        self._contents: dict[int, tuple[int, bytes]] = {}
        self._page_of: dict[bytes, int] = {}
        for page, generation, digest in entries:
            self.note(page, generation, digest)

    def note(self, page: int, generation: int, digest: bytes) -> None:
        """The page holds this now, whatever it held before."""
        old = self._contents.get(page)
        if old is not None and self._page_of.get(old[1]) == page:
            del self._page_of[old[1]]
        self._contents[page] = (generation, digest)
        self._page_of[digest] = page

    def content(self, page: int, generation: int) -> bytes | None:
        """The digest of what is in a page of that generation, if it is known."""
        found, digest = self._contents.get(page, (None, None))
        return digest if found == generation else None

    def page(self, digest: bytes) -> tuple[int, int] | None:
        """(page, generation) where this was last."""
        page = self._page_of.get(digest)
        return None if page is None else (page, self._contents[page][0])

    def clear(self) -> None:
        """Nothing is known any more."""
        self._contents.clear()
        self._page_of.clear()

    def entries(self) -> list[tuple[int, int, bytes]]:
        """(page, generation, digest) of all, in the order in which the pages were first noted."""
        return [(page, generation, digest) for page, (generation, digest) in self._contents.items()]
