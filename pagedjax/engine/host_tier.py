"""The host's share of the cache: pages of preempted sequences, and cached pages that would be recycled.

Both lie in one pool. Full pages are known by a digest of all tokens up to their end, so that sequences with a common past
share them here too. A sequence that waits holds what it will need; what nobody holds is recycled, the least recently used
first. The unfilled last page of a preempted sequence is its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from typing import Any

from pagedjax.config import Config
from pagedjax.engine.choices import Choices
from pagedjax.engine.host_index import HostIndex, chain_digests
from pagedjax.engine.preemption import PreemptionCost
from pagedjax.engine.stats import Counters
from pagedjax.errors import ConfigError
from pagedjax.runner import PublishedRow, Runner, Swapper
from pagedjax.runner.swapper import Copy
from pagedjax.scheduler import Sequence

SPILLED_AT_ONCE = 32
"""Most cached pages copied out beside one dispatch."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """A preempted sequence on the host: num_computed tokens, the digests of their full pages, the unfilled page if any."""

    num_computed: int
    digests: list[bytes]
    last_page: int | None


@dataclasses.dataclass(frozen=True)
class _Spill:
    """Copies of device pages on their way into pages of the pool.

    Attributes:
      contents: (generation, digest) that each should have.
    """

    contents: list[tuple[int, bytes]]
    pages: list[int]
    copies: list[Copy]


class HostTier:
    """Saves and restores sequences, spills and revives cached pages. Without a pool every method does nothing.

    Args:
      config: cache.host_pages, cache.spill, scheduler.preemption, cache.prefix_caching.
      runner: whose pages they are.
      counters: to count in.
      choices: decides what depends on measured times.

    Raises:
      ConfigError: options that contradict each other.
    """

    def __init__(self, config: Config, runner: Runner, counters: Counters, choices: Choices) -> None:
        num_pages, mode = config.cache.host_pages, config.scheduler.preemption
        if mode == "swap" and not num_pages:
            raise ConfigError("config.scheduler.preemption: swap needs config.cache.host_pages above 0")
        if config.cache.spill and not (num_pages and config.cache.prefix_caching):
            raise ConfigError(
                "config.cache.spill: needs config.cache.host_pages above 0 and config.cache.prefix_caching; "
                f"got {num_pages} and {config.cache.prefix_caching}"
            )
        self._runner, self._counters, self._choices = runner, counters, choices
        self._mode, self._caching, self._spills = mode, config.cache.prefix_caching, config.cache.spill
        self._page_size = runner.page_size
        self.swapper = Swapper(runner, num_pages) if num_pages else None
        self.index = HostIndex()
        self.saved: dict[Sequence, Saved] = {}
        self.published: dict[int, tuple[int, bytes]] = {}  # device page -> (its generation, digest)
        self._spill: _Spill | None = None
        self._look: Any = None

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self.swapper.pool.num_pages if self.swapper else 0

    @property
    def num_used(self) -> int:
        """Pages of the pool that hold something."""
        return self.swapper.pool.num_used if self.swapper else 0

    # Preemption

    def save(self, sequence: Sequence) -> bool:
        """Copy what a running sequence has computed, if that is the chosen way and there is room; it loses its row next."""
        # Its last known token has to be computed for its logits, whatever it had done with them.
        num_computed = min(sequence.num_computed, sequence.num_tokens - 1)
        if self.swapper is None or self._mode == "recompute" or num_computed == 0:
            return False
        num_full, rest = divmod(num_computed, self._page_size)
        digests = self._digests(sequence, num_full)
        missing = [i for i, digest in enumerate(digests) if digest not in self.index]
        num_out, num_in = len(missing) + (rest > 0), num_full + (rest > 0)
        if not self._swaps(num_computed, num_out, num_in):
            return False
        present = [digest for digest in digests if digest in self.index]
        for digest in present:  # before room is made, so that none of them is what goes
            self.index.hold(digest)
        if self._room < num_out:
            for digest in present:
                self._let_go(digest)
            return False
        pages = [self._take() for _ in range(num_out)]
        assert sequence.row is not None, "only a running sequence has pages"
        self.swapper.out(sequence.row, [*missing, num_full] if rest else missing, pages)
        for i, page in zip(missing, pages[: len(missing)], strict=True):
            self.index.add(digests[i], page)
            self.index.hold(digests[i])
        self.saved[sequence] = Saved(num_computed, digests, pages[-1] if rest else None)
        self._counters.swapped_out_pages += num_out
        return True

    def _swaps(self, num_tokens: int, num_out: int, num_in: int) -> bool:
        if self._mode == "swap":
            return True
        assert self.swapper is not None
        if self.swapper.out_seconds is None:
            self.swapper.probe()
        cost = PreemptionCost(self._runner.mixed_rate.value, self.swapper.out_seconds, self.swapper.in_seconds)
        return self._choices.make("swap", cost.swap_is_cheaper(num_tokens, num_out, num_in))

    def restore(self, sequence: Sequence) -> int:
        """Bring back what the host has beyond the pages that a sequence, just given a row, found on the device.

        Returns:
          tokens that were found among spilled pages beyond the hit, not counting what it had computed itself.
        """
        saved = self.saved.get(sequence)
        if self.swapper is None or not (saved or self._spills):
            return 0
        hit, found = sequence.num_computed, 0
        start = hit // self._page_size
        pages = self._continuation(sequence, saved, start)
        num_own = max(0, len(saved.digests) - start) if saved else 0
        num_computed = (start + len(pages)) * self._page_size
        if saved and saved.last_page is not None and start + len(pages) == len(saved.digests):
            pages.append(saved.last_page)
            num_computed, num_own = saved.num_computed, num_own + 1
        if num_computed > hit:
            assert sequence.row is not None, "it has just got one"
            done = self.swapper.into(sequence.row, start, pages, num_computed)
            if done:
                sequence.num_computed = min(num_computed, (start + done) * self._page_size)
            own = min(done, num_own)
            self._counters.swapped_in_pages += own
            self._counters.revived_pages += done - own
            found = (done - own) * self._page_size if saved else sequence.num_computed - hit
        self.forget(sequence)
        sequence.update_phase()
        return found

    def _continuation(self, sequence: Sequence, saved: Saved | None, start: int) -> list[int]:
        """Pages of the pool that go on where the device's `start` pages end."""
        # As on the device, the last known token is never covered.
        readable = (sequence.match_tokens - 1) // self._page_size if self._spills else 0
        num_full = max(readable, len(saved.digests) if saved else 0)
        pages: list[int] = []
        if start < num_full:
            for digest in self._digests(sequence, num_full)[start:]:
                page = self.index.page(digest)
                if page is None:
                    break
                pages.append(page)
        return pages

    def forget(self, sequence: Sequence) -> None:
        """A sequence needs its saved pages no more: it has them back, or it ended."""
        saved = self.saved.pop(sequence, None)
        if saved is None:
            return
        assert self.swapper is not None
        if saved.last_page is not None:
            self.swapper.pool.give(saved.last_page)
        for digest in reversed(saved.digests):  # a chain's tail is recycled before its head
            self._let_go(digest)

    def _let_go(self, digest: bytes) -> None:
        self.index.let_go(digest)
        if not self._spills and (page := self.index.forget(digest)) is not None:
            assert self.swapper is not None
            self.swapper.pool.give(page)

    def _digests(self, sequence: Sequence, num_pages: int) -> list[bytes]:
        # Where prefixes are not shared, a sequence has its pages to itself here too.
        root = f"namespace {sequence.namespace}" if self._caching else f"sequence {sequence.rank}"
        return list(chain_digests(root, sequence.token_ids[: num_pages * self._page_size], self._page_size))

    @property
    def _room(self) -> int:
        assert self.swapper is not None
        return self.swapper.pool.num_free + self.index.num_cached

    def _take(self) -> int:
        assert self.swapper is not None
        if not self.swapper.pool.num_free:
            return self.index.recycle()
        return self.swapper.pool.take()

    # Cached pages

    def note_published(self, sequences: Seq[Sequence], rows: Seq[PublishedRow]) -> None:
        """Remember what is in the pages that these sequences' rows have in the prefix index."""
        if not self._spills:
            return
        for sequence, row in zip(sequences, rows, strict=True):
            pages, generations = row.pages()
            digests = self._digests(sequence, min(len(pages), sequence.num_computed // self._page_size))
            for page, generation, digest in zip(pages, generations, digests, strict=False):
                self.published[page] = (generation, digest)

    def forget_numbers(self) -> None:
        """Device pages are about to get new numbers: until they are published again, what is in them is unknown here."""
        self.published.clear()
        self._look = None

    def spill(self) -> None:
        """Start copying cached pages that the next dispatch may recycle and the host does not have.

        With nothing in flight: it waits for the device.
        """
        if not self._spills:
            return
        assert self.swapper is not None
        self.collect()
        self._look = None
        self._start_copies(self.swapper.finish_look(self.swapper.begin_look()))

    def spill_behind(self) -> None:
        """The same while a loop is in flight, without waiting for it: copies what a look of the turn before saw, as far as
        it is still there, and looks again."""
        if not self._spills:
            return
        assert self.swapper is not None
        self.collect()
        if self._look is not None:
            self._start_copies(self.swapper.finish_look(self._look))
        self._look = self.swapper.begin_look()

    def _start_copies(self, seen: list[tuple[int, int]]) -> None:
        assert self.swapper is not None
        physical: list[int] = []
        contents: list[tuple[int, bytes]] = []
        kept = 0
        for page, generation in seen:
            content = self.published.get(page)
            if content is None or content[0] != generation:
                continue
            if self.index.page(content[1]) is not None:  # touched: it must not make room for its neighbours
                kept += 1
            elif content not in contents:
                physical.append(page)
                contents.append(content)
        num = max(0, min(SPILLED_AT_ONCE, len(physical), self._room - kept))
        if num:
            copies = self.swapper.begin_out(physical[:num])
            self._spill = _Spill(contents[:num], [self._take() for _ in range(num)], copies)

    def collect(self) -> None:
        """Take over what is being copied; waits for the dispatch that was started before the copies."""
        spill, self._spill = self._spill, None
        if spill is None:
            return
        assert self.swapper is not None
        generations = self.swapper.finish_out(spill.copies, spill.pages)
        for (generation, digest), page, found in zip(spill.contents, spill.pages, generations, strict=True):
            # It may have been recycled before the copy, or swapped out meanwhile.
            if found != generation or digest in self.index:
                self.swapper.pool.give(page)
            else:
                self.index.add(digest, page)
                self._counters.spilled_pages += 1
