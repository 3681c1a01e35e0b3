"""The engine: takes requests, runs steps, handles the traps that the device loop comes back with.

It is to the decode loop what a kernel's trap handler is to a process: it admits, feeds chunks, looks at what was
generated, gives pages back, preempts where they run out, and re-enters. Synchronous and single-threaded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence as Seq

import jax

from pagedjax.config import Config
from pagedjax.engine.admission import make_group, new_row
from pagedjax.engine.beams import advance_beams, check_beams_fit
from pagedjax.engine.choices import Choices
from pagedjax.engine.forks import branch, completed_prompts, fork_continuations, fork_running
from pagedjax.engine.group import Continuation, RequestGroup
from pagedjax.engine.host_tier import HostTier
from pagedjax.engine.in_flight import InFlight
from pagedjax.engine.prompt_scores import score_prompts
from pagedjax.engine.settling import Settling
from pagedjax.engine.stats import Counters, EngineStats
from pagedjax.engine.take import take_result
from pagedjax.errors import ConfigError, InvalidRequestError, PagedJaxError, QueueFullError
from pagedjax.policy import policy_named
from pagedjax.runner import Flight, ForkedRow, LaneResult, NewRow, Runner, Settlement, Trap
from pagedjax.scheduler import Phase, Plan, Scheduler, Sequence
from pagedjax.types import FinishReason, Request, RequestOutput, SamplingParams
from pagedjax.weights import LoadedModel

ADMIT_AT_ONCE = 8
OFFLINE_SLICE_SECONDS = 1.0
"""Nobody streams, but somebody may press Ctrl-C."""


class Engine:
    """Continuous batching over pages.

    Args:
      loaded: model, tokenizer and their facts.
      config: see `pagedjax.config`.
      runner: the device side; `pagedjax.engine.build.build_engine` makes one from a configuration.
      interactive: keep dispatches short, since requests may arrive or go at any time (a server).
    """

    def __init__(self, loaded: LoadedModel, config: Config, runner: Runner, *, interactive: bool = False) -> None:
        self.loaded, self.config, self.runner, self.interactive = loaded, config, runner, interactive
        self.tokenizer = loaded.tokenizer
        self.model_name = config.model.served_name or loaded.name
        self.max_model_len = runner.max_len
        self.vocab_size = loaded.spec.vocab_size
        self.num_usable_pages = runner.num_usable_pages
        self.counters, self.choices = Counters(), Choices()
        self._tier = HostTier(config, runner, self.counters, self.choices)
        self._scheduler = Scheduler(
            config.scheduler,
            page_size=runner.page_size,
            policy=policy_named(config.scheduler.policy),
            prefix_caching=config.cache.prefix_caching,
            num_pages=runner.num_usable_pages,
            windows=runner.windows,
            allocation=runner.allocation,
        )
        self._in_flight = InFlight(config.seed)
        self._settling = Settling(config, runner, self._scheduler, self._tier, self.counters)
        self._warm_compilations = runner.compilations.count
        self._steps_since_check = 0
        self._flight: tuple[list[Sequence], Flight] | None = None

    # Requests

    def check_request(self, request: Request) -> None:
        """Raises InvalidRequestError where the request could never be served; changes nothing."""
        self._make_group(request, namespace=0, seed=0)

    def _make_group(self, request: Request, *, namespace: int, seed: int) -> RequestGroup:
        group = make_group(
            request,
            self.loaded,
            max_model_len=self.max_model_len,
            rank=self._in_flight.next_rank,
            namespace=namespace,
            seed=seed,
        )
        check_beams_fit(
            group,
            self._scheduler.footprint,
            max_num_seqs=self.config.scheduler.max_num_seqs,
            num_pages=self.num_usable_pages,
            chunk=self.config.scheduler.max_num_batched_tokens,
        )
        return group

    def add_request(self, request: Request, *, arrived: float | None = None) -> None:
        """Queue a request. `arrived`: when it came, on the clock of `time.monotonic`, if that was before this call.

        Raises:
          InvalidRequestError: it cannot be served as it stands, or never could with this pool.
          QueueFullError: too many wait.
        """
        if request.request_id in self._in_flight.groups:
            raise InvalidRequestError("request_id", f"{request.request_id!r} is in flight already")
        if len(self._scheduler.waiting) >= self.config.scheduler.max_waiting:
            raise QueueFullError(f"{self.config.scheduler.max_waiting} requests wait already; try again later")
        group = self._make_group(
            request,
            namespace=self._in_flight.namespaces.of(request.cache_salt),
            seed=self._in_flight.draw_seed(),
        )
        self._in_flight.add(group, self._scheduler.clock() if arrived is None else arrived)
        for continuation in group.continuations:
            self._scheduler.add(continuation.sequence)
        self.counters.prompt_tokens += len(request.prompt_ids)

    def fork(self, request_id: str, new_id: str, sampling: SamplingParams | None = None, *, index: int = 0) -> Request:
        """Branch a request in flight off: the new one's prompt is all that continuation `index` of it knows by now.

        Between two steps nothing is computed or copied for it: it shares every page, and the first of the two to write
        into the last, unfilled one gets a copy of that page. A source that waits (or no room) means that the new request
        waits too, and finds the pages through the prefix cache.

        Args:
          request_id: the request to branch off; it goes on undisturbed.
          new_id: unique among the requests in flight.
          sampling: how the branch goes on, n = 1; by default as the source, with a new seed if that has none. A deadline
            counts from now.

        Returns:
          The new request; its prompt is what the source knew.

        Raises:
          InvalidRequestError: no such request or continuation, it has ended, or what `add_request` raises.
        """
        self._land_all()
        source, request = branch(self._in_flight.groups.get(request_id), request_id, new_id, sampling, index)
        self.add_request(request)
        continuation = self._in_flight.groups[new_id].continuations[0]
        row = fork_running(continuation, source, self._scheduler, self.runner.num_unowned)
        if row is not None:
            self.runner.fork([row])
            self.counters.forks += 1
            self._note_hit(continuation.sequence, continuation.sequence.num_computed)
        return request

    def abort(self, request_id: str) -> None:
        """End a request now and give its pages back. Unknown ids (it just finished) are fine."""
        group = self._in_flight.groups.get(request_id)
        if group is not None:
            self._settling.end(group.end(FinishReason.ABORT))
            self._in_flight.forget(group)

    def _end_overdue(self) -> None:
        """End requests whose deadline has passed: nobody waits for the rest of them."""
        overdue = self._in_flight.overdue(self._scheduler.clock())
        if overdue:
            self._land_all()  # what they have generated by now is theirs
        for group in overdue:
            self._settling.end(group.end(FinishReason.DEADLINE))

    def has_unfinished(self) -> bool:
        return bool(self._in_flight.groups)

    @property
    def request_ids(self) -> list[str]:
        """Requests in flight."""
        return list(self._in_flight.groups)

    @property
    def num_waiting(self) -> int:
        """Sequences without a row."""
        return len(self._scheduler.waiting)

    # One turn

    def step(self) -> list[RequestOutput]:
        """Admit, run one dispatch, and report what is new of each request (deltas).

        While nobody waits, the next decode loop is started before the last one is read, so that the device works while
        the host looks at text; then a turn reads the loop that the turn before started.
        """
        self._end_overdue()
        if self._flight is None:
            self._admit()
            self._tier.spill()
            self._dispatch()
        else:
            self._land(overlap=True)
            self._tier.spill_behind()
        if self._flight is None:
            self._tier.collect()
        self._debug_check()
        return self._in_flight.drain()

    def _admit(self) -> None:
        """Give rows to waiting sequences: match their prefixes, keep those for which there is room."""
        while chosen := self._scheduler.candidates(self.runner.num_unowned, ADMIT_AT_ONCE):
            hits = self.runner.admit([self._new_row(s, row) for s, row in chosen])
            refused: list[Settlement] = []
            accepted: list[tuple[Sequence, int]] = []
            for (sequence, row), hit in zip(chosen, hits, strict=True):
                if refused or not self._scheduler.accept(sequence, row, hit, self.runner.num_unowned):
                    refused.append(Settlement(row, length=0, namespace=0, release=True))
                else:
                    accepted.append((sequence, hit or 0))
            if refused:
                self.runner.settle(refused)
            self._restore(accepted)
            if refused:
                return

    def _new_row(self, sequence: Sequence, row: int) -> NewRow:
        reserved = self.runner.allocation.reserved(sequence.prompt_len, sequence.max_total, self.max_model_len)
        return new_row(
            self._in_flight.continuations[sequence],
            row,
            reads_cache=self.config.cache.prefix_caching,
            num_reserved=self._scheduler.footprint.logical(reserved),
        )

    def _restore(self, accepted: list[tuple[Sequence, int]]) -> None:
        """Go on in the host tier where the hits of new rows end. What it had can be shared again."""
        for sequence, hit in accepted:
            self._note_hit(sequence, hit + self._tier.restore(sequence))
        self._settling.publish([sequence for sequence, hit in accepted if sequence.num_computed > hit])

    def _note_hit(self, sequence: Sequence, hit: int) -> None:
        self.counters.prefix_queries += sequence.num_tokens
        self.counters.prefix_hits += hit
        if sequence.num_preemptions == 0:
            self.counters.cached_prompt_tokens += hit
            if sequence.index == 0:
                self._in_flight.group_of(sequence).num_cached_tokens = hit

    # Dispatches

    def _dispatch(self) -> None:
        plan = self._scheduler.plan()
        if plan is None:
            if self._scheduler.running:
                # Beams wait for others that find no room: the last search gives its rows back.
                self._preempt()
        elif plan.is_decode:
            self._start_decode([s for s, _ in plan.lanes])
            self._land(overlap=True)
        else:
            self.counters.dispatches += 1
            self._mixed(plan)

    def _mixed(self, plan: Plan) -> None:
        """One step of chunks and decodes; preempts first where its pages are not there."""
        lanes = list(plan.lanes)
        while self._scheduler.pages_needed(lanes) > self.runner.num_unowned:
            victims = self._preempt()
            lanes = [(s, q) for s, q in lanes if s not in victims]
        if not lanes:
            return
        results, hidden = self.runner.mixed([(s.its_row, q) for s, q in lanes])
        self.counters.steps += 1
        score_prompts(self.runner, self._in_flight.groups, lanes, results, hidden)
        for (sequence, q_len), result in zip(lanes, results, strict=True):
            if result.ok:
                sequence.num_computed += q_len
                self._take(sequence, result)
        forked = self._fork_continuations(lanes, results, hidden)
        self._after_dispatch([s for s, _ in lanes] + forked)
        if not all(result.ok for result in results):
            self._preempt()

    def _fork_continuations(
        self, lanes: list[tuple[Sequence, int]], results: list[LaneResult], hidden: jax.Array
    ) -> list[Sequence]:
        """Start the other continuations of requests whose prompt this step completed."""
        forked: list[tuple[Continuation, ForkedRow]] = []
        for sequence, index in completed_prompts(lanes, results):
            group = self._in_flight.group_of(sequence)
            forked += fork_continuations(group, self._scheduler, self.runner.num_unowned, index)
        if forked:
            self.counters.forks += len(forked)
            for (continuation, _), result in zip(forked, self.runner.fork([f for _, f in forked], hidden), strict=True):
                self._take(continuation.sequence, result)
        return [continuation.sequence for continuation, _ in forked]

    def _start_decode(self, sequences: list[Sequence]) -> None:
        """Decode on the device until a trap; `_land` handles it."""
        self.counters.dispatches += 1
        self._flight = (
            sequences,
            self.runner.start_decode(
                [s.its_row for s in sequences],
                [self._budget(s) for s in sequences],
                max_steps=self._max_steps(len(sequences)),
                leave_on_finish=bool(self._scheduler.waiting),
            ),
        )

    def _land(self, *, overlap: bool) -> None:
        """Read the decode loop in flight and handle its trap."""
        assert self._flight is not None
        (sequences, flight), self._flight = self._flight, None
        if overlap and self._may_overlap(sequences, flight):
            self._start_decode([s for s in sequences if s.phase is Phase.DECODE])
        trap, results = self.runner.finish_decode(flight)
        self.counters.steps += max(len(result.samples.tokens) for result in results)
        # What ended or lost its row since the loop was started ran on for nothing.
        lanes = [(s, r) for s, r in zip(sequences, results, strict=True) if s.row == r.row and s.phase is Phase.DECODE]
        for sequence, result in lanes:
            sequence.num_computed += len(result.samples.tokens)
            self._take(sequence, result)
        self._after_dispatch([s for s, _ in lanes])
        if trap is Trap.FAULT and self._flight is not None:
            self._land(overlap=False)  # it met the same fault at once
        elif trap is Trap.FAULT and self._scheduler.running:
            # Pages given back meanwhile may be what the fault was about; then the next loop finds out.
            stuck = self.runner.is_latest(flight) and not any(len(result.samples.tokens) for result in results)
            if stuck or not self._has_room():
                self._preempt()

    def _may_overlap(self, sequences: list[Sequence], flight: Flight) -> bool:
        """Whether the next loop may start before this one is read: nobody waits for its end, and it leaves work."""
        if not self.config.runner.overlap or self._scheduler.waiting or len(sequences) < len(self._scheduler.running):
            return False
        going = [s for s in sequences if s.phase is Phase.DECODE]
        if any(s.request.sampling.beam_width for s in going):
            return False
        return any(s.max_total - s.num_tokens > flight.max_steps for s in going)

    def _land_all(self) -> None:
        """Bring what the host knows up to what the device has done."""
        if self._flight is not None:
            self._land(overlap=False)

    def _budget(self, sequence: Sequence) -> int:
        if sequence.request.sampling.beam_width:
            return 1
        limit = self.config.runner.stop_string_budget if sequence.request.sampling.stop else self.runner.buffer_steps
        return min(limit, self.runner.buffer_steps)

    def _max_steps(self, num_rows: int) -> int:
        seconds = self.config.runner.slice_ms / 1e3 if self.interactive else OFFLINE_SLICE_SECONDS
        # What arrives may have to wait for two loops then.
        overlaps = self.config.runner.overlap and not self._scheduler.waiting
        seconds = seconds / 2 if overlaps else seconds
        seconds = min(seconds, self._in_flight.seconds_left(self._scheduler.clock()))
        return self.choices.make(
            "max_steps", min(self.runner.steps_within(num_rows, seconds), self._settling.most_steps)
        )

    def _has_room(self) -> bool:
        lanes = [(s, 1) for s in self._scheduler.running if s.phase is Phase.DECODE]
        return self._scheduler.pages_needed(lanes) <= self.runner.num_unowned

    def _preempt(self) -> list[Sequence]:
        """Take the row of the last in policy order, of all its beams where it is one. What it computed goes to the host, if
        that is cheaper than computing it again, and stays in the prefix cache until the pages are needed. Returns what lost
        its row."""
        victim = self._scheduler.victim()
        victims = [victim]
        if (search := self._in_flight.beams_of(victim)) is not None:
            victims = [s for s in search.beams if s.row is not None]
            search.displace()
        for sequence in victims:
            self._tier.save(sequence)
        self._settling.settle(victims, release=True)
        self._scheduler.preempt(victims)
        self.counters.preemptions += len(victims)
        return victims

    # After a dispatch

    def _take(self, sequence: Sequence, result: LaneResult) -> None:
        search = self._in_flight.beams_of(sequence)
        if search is not None and len(result.samples.tokens):
            search.take(sequence, result.samples)
            return
        self.counters.generation_tokens += take_result(self._in_flight.continuations[sequence], result)

    def _after_dispatch(self, sequences: Seq[Sequence]) -> None:
        """Publish what is due, and let go of what ended."""
        ended, publish = advance_beams(self._in_flight.groups.values(), self._scheduler, self.runner, self.counters), []
        for sequence in sequences:
            continuation = self._in_flight.continuations[sequence]
            if continuation.finish_reason is not None:
                if continuation not in ended:
                    ended.append(continuation)
            elif self._settling.is_due(sequence):
                publish.append(sequence)
        self._settling.publish(publish)
        self._settling.end(ended)

    def _debug_check(self) -> None:
        """Look at the page invariants every `runner.check_every` dispatches."""
        every = self.config.runner.check_every
        self._steps_since_check += 1
        if every and self._steps_since_check >= every:
            self._steps_since_check = 0
            broken = self.runner.check()
            if broken:
                raise PagedJaxError("page invariants broken: " + "; ".join(broken))

    # What is going on

    def stats(self) -> EngineStats:
        """Numbers for people and for /metrics. Costs a small dispatch."""
        return EngineStats.collect(
            self.counters,
            self.runner,
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            compilations=self.runner.compilations.count - self._warm_compilations,
            host_pages=(self._tier.num_used, self._tier.num_pages),
        )

    def compact(self) -> tuple[float, float]:
        """Move pages so that the pages of each running sequence adjoin; no output changes. Between two steps.

        Takes as long as copying the pages that move, and compiles a program the first time. What it brings depends on the
        backend and the machine's caches: measure with `scripts/bench_layout.py`. Nothing calls it by itself.

        Returns:
          Contiguity before and after: share of the steps from page to page within a sequence that lead to the adjoining one.

        Raises:
          ConfigError: config.cache.allocation is not `paged`.
        """
        if not self.runner.allocation.is_paged:
            raise ConfigError(f"config.cache.allocation: compact needs paged, got {self.config.cache.allocation}")
        self._land_all()
        self._tier.forget_numbers()
        return self.runner.compact()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a snapshot, from which `restore_engine` goes on; see `pagedjax.engine.snapshot.save_engine`."""
        from pagedjax.engine.snapshot import save_engine  # it is built around this module

        save_engine(self, folder)

    def warm_up(self, *, progress: bool = True) -> None:
        """Compile every program; compilations are counted from here on."""
        started = time.perf_counter()
        self.runner.programs.warm_up(progress=progress)
        self.counters.warm_up_seconds = time.perf_counter() - started
        self._warm_compilations = self.runner.compilations.count
