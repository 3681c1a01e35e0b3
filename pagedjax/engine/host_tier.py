"""The host's share of the cache: pages of preempted sequences, and cached pages that would be recycled.

Both lie in one pool. Full pages are known by their layer group and a digest of all tokens up to their end, so that sequences
with a common past share them here too. A sequence that waits holds what it will need, of each group what its window shows;
what nobody holds is recycled, the least recently used first. The unfilled last pages of a preempted sequence are its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import jax

from pagedjax.config import Config
from pagedjax.engine.choices import Choices
from pagedjax.engine.host_index import DevicePages, HostIndex, chain_digests, group_digest
from pagedjax.engine.host_places import Place, needed, reaches
from pagedjax.engine.preemption import PreemptionCost
from pagedjax.engine.stats import Counters
from pagedjax.errors import ConfigError
from pagedjax.pages.capacity import Footprint
from pagedjax.runner import PublishedRow, Runner, Swapper
from pagedjax.runner.swapper import Copy
from pagedjax.scheduler import Sequence

SPILLED_AT_ONCE = 32
"""Most cached pages of each layer group copied out beside one dispatch."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """A preempted sequence on the host: num_computed tokens, the digests of the full pages that it needs then, and the
    unfilled last page of each group if there is one."""

    num_computed: int
    digests: list[bytes]
    last_pages: list[int]


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
        self._footprint = Footprint(runner.page_size, runner.windows)
        self.swapper = Swapper(runner, num_pages) if num_pages else None
        self.index = HostIndex()
        self.saved: dict[Sequence, Saved] = {}
        self.published = DevicePages()
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
        places = needed(self._footprint, num_computed)
        num_full = num_computed // self._page_size
        digest_of = self._digest_of(sequence, num_full)
        full = {place: digest_of(place) for place in places if place.column < num_full}
        present = [digest for digest in full.values() if digest in self.index]
        missing = {place: digest for place, digest in full.items() if digest not in self.index}
        out = [*missing, *places[len(full) :]]  # the unfilled ones come last
        if not self._swaps(num_computed, len(out), len(places)):
            return False
        for digest in present:  # before room is made, so that none of them is what goes
            self.index.hold(digest)
        pages = [self._take() for _ in out] if self._room >= len(out) else []
        assert sequence.row is not None, "only a running sequence has pages"
        if len(pages) < len(out) or not self.swapper.out(sequence.row, out, pages):
            for page in pages:
                self.swapper.pool.give(page)
            for digest in present:
                self._let_go(digest)
            return False
        for digest, page in zip(missing.values(), pages, strict=False):
            self.index.add(digest, page)
            self.index.hold(digest)
        self.saved[sequence] = Saved(num_computed, list(full.values()), pages[len(missing) :])
        self._counters.swapped_out_pages += len(out)
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
        num_computed, places, pages = self._continuation(sequence, saved, hit)
        if num_computed > hit:
            assert sequence.row is not None, "it has just got one"
            self.swapper.into(sequence.row, places, pages, num_computed)
            sequence.num_computed = num_computed
            saved_tokens = saved.num_computed if saved else 0
            num_own = sum(place.column * self._page_size < saved_tokens for place in places)
            self._counters.swapped_in_pages += num_own
            self._counters.revived_pages += len(places) - num_own
            found = max(0, num_computed - max(hit, saved_tokens))
        self.forget(sequence)
        sequence.update_phase()
        return found

    def _continuation(self, sequence: Sequence, saved: Saved | None, hit: int) -> tuple[int, list[Place], list[int]]:
        """The most tokens that a row with `hit` of them can have with pages of the pool: (tokens, the places to be filled,
        and with what). No more than `hit`, and nothing, where the pool does not go on or the device has no room."""
        start = hit // self._page_size
        # As on the device, the last known token is never covered.
        readable = (sequence.match_tokens - 1) // self._page_size if self._spills else 0
        num_full = max(readable, saved.num_computed // self._page_size if saved else 0)
        if start >= num_full and not (saved and saved.num_computed > hit):
            return hit, [], []
        digest_of = self._digest_of(sequence, num_full)
        on_device = self._on_device()
        ends = reaches(
            self._footprint,
            lambda place: (digest := digest_of(place)) in self.index or on_device(digest) is not None,
            start,
            num_full,
        )
        options = {end * self._page_size for end in ends} | ({saved.num_computed} if saved else set())
        for num_computed in sorted(options, reverse=True):
            if num_computed <= hit:
                break
            places = needed(self._footprint, num_computed, start)
            has = hit % self._page_size > 0  # of the first column, a copy of its own, where there is one group
            full = [place for place in places if (place.column + 1) * self._page_size <= num_computed]
            digests = [digest_of(place) for place in full]
            if len(places) - has > self._runner.num_unowned or not self._fetch(digests, on_device):
                continue
            pages = [page for page in map(self.index.page, digests) if page is not None]
            assert len(pages) == len(full), "all are on the host now"
            if len(full) < len(places):
                assert saved is not None, "an unfilled page is a saved one"
                pages += saved.last_pages
            return num_computed, places, pages
        return hit, [], []

    def _on_device(self) -> Callable[[bytes], int | None]:
        """A look at what the device has cached: gives the page that holds the content, None where none does.

        Where layers see windows, the device's own index loses a whole chain with the first page that is reused, and what
        falls out of a window is reused first. By digest, the rest is still of use.
        """
        if not (self._spills and any(self._runner.windows)):
            return lambda digest: None
        pages = self._runner.state.pages
        parents, generations = jax.device_get((pages.parent, pages.generation))

        def page(digest: bytes) -> int | None:
            found = self.published.page(digest)
            # A page that is published no more counts as free: nobody promises that it is left as it is.
            return found[0] if found and parents[found[0]] and generations[found[0]] == found[1] else None

        return page

    def _fetch(self, digests: list[bytes], on_device: Callable[[bytes], int | None]) -> bool:
        """Copy those of full pages that the host lacks from the device; False where there is no room for them."""
        absent = [digest for digest in digests if digest not in self.index]
        if not absent:
            return True
        present = [digest for digest in digests if digest in self.index]
        for digest in present:  # they must not make room for the others
            self.index.hold(digest)
        room = self._room >= len(absent)
        if room:
            assert self.swapper is not None
            physical = [page for page in map(on_device, absent) if page is not None]
            pages = [self._take() for _ in absent]
            self.swapper.finish_out(self.swapper.begin_out(physical), pages)
            for digest, page in zip(absent, pages, strict=True):
                self.index.add(digest, page)
            self._counters.spilled_pages += len(absent)
        for digest in present:
            self._let_go(digest)
        return room

    def forget(self, sequence: Sequence) -> None:
        """A sequence needs its saved pages no more: it has them back, or it ended."""
        saved = self.saved.pop(sequence, None)
        if saved is None:
            return
        assert self.swapper is not None
        for page in saved.last_pages:
            self.swapper.pool.give(page)
        for digest in reversed(saved.digests):  # a chain's tail is recycled before its head
            self._let_go(digest)

    def _let_go(self, digest: bytes) -> None:
        self.index.let_go(digest)
        if not self._spills and (page := self.index.forget(digest)) is not None:
            assert self.swapper is not None
            self.swapper.pool.give(page)

    def _digest_of(self, sequence: Sequence, num_pages: int) -> Callable[[Place], bytes]:
        """What the first num_pages columns of a sequence are known by."""
        # Where prefixes are not shared, a sequence has its pages to itself here too.
        root = f"namespace {sequence.namespace}" if self._caching else f"sequence {sequence.rank}"
        tokens = sequence.token_ids[: num_pages * self._page_size]
        chain = list(chain_digests(root, tokens, self._page_size))
        return lambda place: group_digest(chain[place.column], place.group)

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
            num_full = sequence.num_computed // self._page_size
            new = [
                (Place(group, column), page, generation)
                for group, column, page, generation in row.pages()
                if column < num_full and self.published.content(page, generation) is None
            ]
            digest_of = self._digest_of(sequence, num_full if new else 0)
            for place, page, generation in new:
                self.published.note(page, generation, digest_of(place))

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
            digest = self.published.content(page, generation)
            if digest is None:
                continue
            if self.index.page(digest) is not None:  # touched: it must not make room for its neighbours
                kept += 1
            elif (generation, digest) not in contents:
                physical.append(page)
                contents.append((generation, digest))
        num = max(0, min(SPILLED_AT_ONCE * self._footprint.num_groups, len(physical), self._room - kept))
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
