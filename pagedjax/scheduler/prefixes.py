"""What the prefix index on the device is expected to hold, as the host can tell without asking it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pagedjax.scheduler.sequence import Sequence


class KnownPrefixes:
    """Guesses how many tokens the prefix cache has for a waiting sequence. Orders the queue, and decides nothing else: what
    is mapped is what the index finds.

    It remembers the pages of published prefixes, the most recently used ones, as many as the pool holds. A hit that turns
    out shorter corrects it. Until the first question it remembers nothing and costs nothing.

    Args:
      page_size: tokens in a page.
      max_pages: pages remembered.
    """

    def __init__(self, *, page_size: int, max_pages: int) -> None:
        self._page_size, self._max_pages = page_size, max_pages
        self._pages: dict[int, None] = {}  # by the hash of everything up to its end; least recently used first
        self._asked = False

    def hits(self, sequences: Iterable[Sequence]) -> Iterator[int]:
        """Tokens that the index is expected to have for each sequence; as in the index, never its last one."""
        self._asked = True
        pages = self._pages
        for s in sequences:
            # Thousands may wait, and only few of them are concerned by what changed since the last time.
            if s.expected_hit < 0 or s.next_key in pages or (s.last_key is not None and s.last_key not in pages):
                self._look_up(s)
            yield s.expected_hit

    def _look_up(self, sequence: Sequence) -> None:
        size, limit = self._page_size, max(sequence.match_tokens - 1, 0) // self._page_size
        keys, known = sequence.page_keys, max(sequence.expected_hit, 0) // size
        # A chain loses its tail before its head, so what is known of it is a beginning.
        while known and keys[known - 1] not in self._pages:
            known -= 1
        while known < limit and self._keys(sequence, known + 1)[known] in self._pages:
            known += 1
        sequence.expected_hit = known * size
        sequence.last_key = keys[known - 1] if known else None
        sequence.next_key = keys[known] if known < limit else None

    def note(self, sequence: Sequence, num_tokens: int) -> None:
        """The full pages of the sequence's first num_tokens tokens are in the index."""
        num_pages = num_tokens // self._page_size
        if self._asked and num_pages > sequence.num_noted:
            self._touch(self._keys(sequence, num_pages)[:num_pages])
            sequence.num_noted = num_pages

    def correct(self, sequence: Sequence, hit: int) -> None:
        """The index was asked about a sequence, and had `hit` tokens."""
        if not self._asked:
            return
        (expected,) = self.hits([sequence])
        expected, found = expected // self._page_size, hit // self._page_size
        keys = self._keys(sequence, max(expected, found))
        for key in keys[found:expected]:
            self._pages.pop(key, None)
        self._touch(keys[:found])

    def _touch(self, keys: list[int]) -> None:
        for key in reversed(keys):  # the head last, so that it is forgotten last
            self._pages.pop(key, None)
            self._pages[key] = None
        while len(self._pages) > self._max_pages:
            del self._pages[next(iter(self._pages))]

    def _keys(self, sequence: Sequence, num_pages: int) -> list[int]:
        """Hashes of at least the first num_pages full pages, each with all that comes before; computed once a sequence."""
        keys, size = sequence.page_keys, self._page_size
        for i in range(len(keys), num_pages):
            before = keys[-1] if keys else sequence.namespace
            keys.append(hash((before, sequence.token_ids[i * size : (i + 1) * size].tobytes())))
        return keys
