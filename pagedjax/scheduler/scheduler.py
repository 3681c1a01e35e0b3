"""Queues and page counts: which sequences get a row, which tokens go into the next step, who yields when pages run out."""

from __future__ import annotations

import bisect
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from pagedjax.config import SchedulerConfig
from pagedjax.pages.capacity import PAGED, Allocation, Footprint
from pagedjax.policy import Policy, Tenants
from pagedjax.scheduler.features import SequenceFeatures
from pagedjax.scheduler.prefixes import KnownPrefixes
from pagedjax.scheduler.sequence import Phase, Sequence

MAX_LOOKAHEAD = 256
"""Waiting sequences looked at for one admission."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The next dispatch: a mixed step over (sequence, tokens) lanes, or a decode loop where `is_decode`."""

    lanes: list[tuple[Sequence, int]]
    is_decode: bool


class Scheduler:
    """Admits in policy order, first come first served by default; plans steps; picks victims.

    Args:
      config: limits.
      page_size: tokens in a page.
      policy: scores sequences, the lowest first.
      prefix_caching: a sequence waits for a running one that is just computing a prefix it shares.
      num_pages: pages in the pool; so many are remembered to guess what the prefix cache has.
      clock: seconds, for what has a deadline.
      windows: tokens that a query sees, one entry a layer group; 0: all.
      allocation: when sequences get pages.

    Attributes:
      waiting: in policy order as of the last admission, then as they came.
      running: in order of arrival.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        page_size: int,
        policy: Policy,
        prefix_caching: bool,
        num_pages: int = 2**16,
        windows: tuple[int, ...] = (0,),
        allocation: Allocation = PAGED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.page_size, self.policy, self.clock = config, page_size, policy, clock
        self.footprint = Footprint(page_size, windows, allocation)
        self.prefix_caching = prefix_caching
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._tenants = Tenants()
        self._known = KnownPrefixes(page_size=page_size, max_pages=num_pages) if prefix_caching else None
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._refused: set[Sequence] = set()  # they found no room, or yielded, and nobody ended since

    # Queues

    def add(self, sequence: Sequence) -> None:
        """Let a new or displaced sequence wait. `candidates` puts it where its score says."""
        if math.isnan(sequence.arrived):
            sequence.arrived = self.clock()
        if sequence.request.deadline is not None:
            sequence.deadline_at = sequence.arrived + sequence.request.deadline
        sequence.head = sequence.known_ids[: self.page_size].tobytes()
        self._tenants.join(sequence.request.tenant, is_new=sequence.num_preemptions == 0)
        self.waiting.append(sequence)

    def _ranking(self, sequences: list[Sequence]) -> np.ndarray:
        """Indices of sequences in policy order, of equal ones the oldest first. Scores change while sequences wait, so all
        are computed anew, at once."""
        features: Any = SequenceFeatures(sequences, self._tenants, self._known, self.clock())
        scores = np.broadcast_to(self.policy(features), (len(sequences),))
        return np.lexsort((features.arrival, scores))

    def _note_progress(self) -> None:
        """Charge tenants for what was generated for them, and remember what was published."""
        for sequence in self.running:
            self._note_sequence(sequence, sequence.num_published)

    def _note_sequence(self, sequence: Sequence, num_published: int) -> None:
        self._tenants.charge(sequence.request.tenant, output=sequence.num_generated - sequence.num_charged)
        sequence.num_charged = sequence.num_generated
        if self._known is not None:
            self._known.note(sequence, num_published)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that ended or lost its row. Its row is free again."""
        if sequence.row is None:
            self.waiting.remove(sequence)
            self._tenants.leave(sequence.request.tenant)
            self._refused.discard(sequence)
            return
        sequence.num_noted = 0  # its pages are the most recently used ones once more
        self._note_sequence(sequence, sequence.num_computed)
        self.running.remove(sequence)
        self._free_rows.append(sequence.row)
        self._refused.clear()

    def preempt(self, sequences: list[Sequence]) -> None:
        """Back to the queue, together; what they have generated is kept and will be computed again.

        What they give back is for those that could not grow: let in again before somebody ends, they would take it away
        from them, and so by turns for ever.
        """
        refused = self._refused | set(sequences)
        for sequence in sequences:
            self.remove(sequence)
            sequence.displace()
            sequence.num_preemptions += 1
            self.add(sequence)
        self._refused = refused

    # Admission

    def candidates(self, num_unowned: int, width: int) -> list[tuple[Sequence, int]]:
        """Up to `width` waiting sequences that may be given rows now, with the rows. Nothing is decided yet:
        how much the prefix cache has for them is known after they were matched (`accept`, `refuse`)."""
        if not self.waiting or not self._free_rows:
            return []
        if self.running and num_unowned <= self._outstanding(self.running):
            return []
        self._note_progress()
        self.waiting = [self.waiting[i] for i in self._ranking(self.waiting)]
        # Held beams end only after the others of their search were let in: those go first, whatever the policy. If another
        # search came between, two could take turns at yielding to one another for ever.
        held = {s.request.request_id for s in self.running if s.held}
        if held:
            self.waiting.sort(key=lambda s: s.request.request_id not in held)
        going = any(not s.held for s in self.running)
        search = self._incomplete_search()
        chosen: list[tuple[Sequence, int]] = []
        for sequence in self.waiting[:MAX_LOOKAHEAD]:
            if len(chosen) == min(width, len(self._free_rows)) or (going and sequence in self._refused):
                break
            request = sequence.request
            if sequence.waits_for_fork or (request.sampling.beam_width and search not in (None, request.request_id)):
                continue
            computing = [s for s in self.running if s.phase is Phase.PREFILL] + [s for s, _ in chosen]
            if not self._waits_for_prefix(sequence, computing):
                chosen.append((sequence, self._free_rows[-1 - len(chosen)]))
                search = request.request_id if request.sampling.beam_width else search
        return chosen

    def _incomplete_search(self) -> str | None:
        """A beam search of which some beams run and some wait. There is one at most: the beams of two would hold what the
        others need."""
        waiting = {s.request.request_id for s in self.waiting}
        ids = (s.request.request_id for s in self.running if s.request.sampling.beam_width)
        return next((request_id for request_id in ids if request_id in waiting), None)

    def accept(self, sequence: Sequence, row: int, hit: int | None, num_unowned: int) -> bool:
        """Decide on a candidate whose matched pages are mapped. False: there is no room; it must be released again.

        There is room when the pages it still needs for what is known, and for a share of what may come, are there beside
        those that running sequences need for the same. Alone it always has room: its length was checked when it came.
        No `hit`: its pages could not be reserved.
        """
        if hit is None:
            self._refused.add(sequence)
            return False
        if self._known is not None:
            self._known.correct(sequence, hit)
        before = sequence.num_computed
        sequence.num_computed = hit
        fits = not self.running or self._outstanding([*self.running, sequence]) <= num_unowned
        sequence.num_computed = before
        if not fits:
            self._refused.add(sequence)
            return False
        self._place(sequence, row, hit)
        return True

    def _place(self, sequence: Sequence, row: int, num_computed: int) -> None:
        self.waiting.remove(sequence)
        self._free_rows.remove(row)
        tenant = sequence.request.tenant
        self._tenants.leave(tenant)
        sequence.service = self._tenants.served(tenant)
        if not sequence.is_charged:
            # What a preempted sequence computes again is not its tenant's doing.
            self._tenants.charge(tenant, prompt=sequence.num_tokens - num_computed)
            sequence.is_charged = True
        self._refused.discard(sequence)
        sequence.place(row, num_computed)
        sequence.num_published = num_computed // self.page_size * self.page_size
        bisect.insort(self.running, sequence, key=lambda s: s.rank)

    def accept_fork(self, sequence: Sequence, num_computed: int, num_unowned: int) -> int | None:
        """Give a waiting sequence a row that begins with the pages of another one; None where there is no room, or pages are
        not shared.

        Nothing is mapped before the decision: only what the sequence will need of its own counts. What finds no room
        waits and comes back through the prefix cache.
        """
        if not self._free_rows or not self.footprint.allocation.is_paged:
            return None
        before = sequence.num_computed
        sequence.num_computed, sequence.shares_last_page = num_computed, num_computed % self.page_size > 0
        if self._outstanding([*self.running, sequence]) > num_unowned:
            sequence.num_computed, sequence.shares_last_page = before, False
            return None
        row = self._free_rows[-1]
        self._place(sequence, row, num_computed)
        sequence.num_published = 0
        return row

    def _outstanding(self, sequences: Iterable[Sequence]) -> int:
        """Pages that sequences are expected to take yet."""
        total = 0
        for s in sequences:
            growth = int(self.config.growth_share * (s.max_total - s.num_tokens))
            # The last token's keys and values are never needed.
            expected = min(s.num_tokens + 1 + growth, s.max_total - 1)
            chunk = 1 if s.phase is Phase.DECODE else self.config.max_num_batched_tokens
            total += self.footprint.growth(s.num_computed, expected, chunk) + self._copies(s)
        return total

    def _copies(self, sequence: Sequence) -> int:
        """Pages that its next token has copied: one a group where others hold the last page too."""
        return self.footprint.num_groups if sequence.shares_last_page else 0

    def _waits_for_prefix(self, sequence: Sequence, computing: list[Sequence]) -> bool:
        """Whether a sequence ahead is computing a page that this one could share once it is published."""
        if not self.prefix_caching or sequence.match_tokens <= 1:
            return False
        for other in computing:
            if other.namespace != sequence.namespace or other.head != sequence.head:
                continue
            length = min(other.num_tokens, sequence.num_tokens - 1)
            differs = np.flatnonzero(other.token_ids[:length] != sequence.token_ids[:length])
            common = int(differs[0]) if differs.size else length
            if common // self.page_size * self.page_size > other.num_published:
                return True
        return False

    # Steps

    def plan(self) -> Plan | None:
        """The next dispatch over the running sequences; None where none can go on."""
        running = [s for s in self.running if not s.held]
        if not running:
            return None
        decoding = [s for s in running if s.phase is Phase.DECODE]
        prefilling = [s for s in running if s.phase is Phase.PREFILL]
        lanes = [(s, 1) for s in decoding]
        if not prefilling:
            return Plan(lanes, is_decode=True)
        budget = self.config.max_num_batched_tokens - len(lanes)
        for s in (prefilling[i] for i in self._ranking(prefilling)):
            chunk = min(budget, s.num_tokens - s.num_computed)
            if chunk <= 0:
                break
            lanes.append((s, chunk))
            budget -= chunk
        return Plan(lanes, is_decode=False)

    def pages_needed(self, lanes: list[tuple[Sequence, int]]) -> int:
        """New pages that a step over `lanes` takes."""
        grown = sum(self.footprint.taken(s.num_computed, s.num_computed + q) for s, q in lanes)
        return grown + sum(self._copies(s) for s, _ in lanes)

    def victim(self) -> Sequence:
        """Who yields when running sequences cannot grow: the last in policy order, whole."""
        return self.running[self._ranking(self.running)[-1]]

    # Snapshots

    def record(self) -> dict[str, Any]:
        """The queues by rank, as JSON values."""
        return {
            "waiting": [s.rank for s in self.waiting],
            "running": [s.rank for s in self.running],
            "free_rows": list(self._free_rows),
            "refused": sorted(s.rank for s in self._refused),
            "tenants": self._tenants.record(),
            "clock": self.clock(),
        }

    def load(self, record: Mapping[str, Any], by_rank: Mapping[int, Sequence]) -> None:
        """Go on from a `record`, with the sequences it names. Time goes on where it stood; what the prefix cache has is learnt
        anew."""
        self.waiting = [by_rank[rank] for rank in record["waiting"]]
        self.running = [by_rank[rank] for rank in record["running"]]
        self._free_rows = list(record["free_rows"])
        self._refused = {by_rank[rank] for rank in record["refused"]}
        self._tenants.load(record["tenants"])
        later = self.clock() - record["clock"]
        for sequence in by_rank.values():
            sequence.arrived += later
            sequence.deadline_at += later
            sequence.num_noted = 0

    @property
    def blocked(self) -> bool:
        """Somebody found no room, or yielded, and nobody ended since: who comes after waits."""
        return bool(self._refused)
