"""Schedulers and sequences for tests, and a make-believe device: page counts only, thousands of steps in a moment."""

from __future__ import annotations

import itertools

from pagedjax import Request, SamplingParams
from pagedjax.config import SchedulerConfig
from pagedjax.policy import Policy, first_come
from pagedjax.scheduler import Phase, Scheduler, Sequence

ADMIT_AT_ONCE = 8


def sequence(rank: int, *, prompt: int = 8, grow: int = 8, first: int | None = None, **fields) -> Sequence:
    """A waiting sequence whose prompt begins with `first` (by default, with its rank)."""
    ids = (rank if first is None else first,) * prompt
    request = Request(str(rank), ids, SamplingParams(), **fields)
    return Sequence.start(request, index=0, rank=rank, max_total=prompt + grow, namespace=0)


def make(
    policy=first_come, *, seqs: int = 4, tokens: int = 16, share: float = 0.0, caching: bool = True, windows=(0,)
) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens, growth_share=share)
    return Scheduler(config, page_size=4, policy=policy, prefix_caching=caching, windows=windows)


class Machine:
    """Drives a scheduler as the engine does. Every sequence ends at its max_total; there is no prefix cache.

    Attributes:
      admitted: sequences in the order in which they first got a row.
      finished: sequences in the order in which they ended.
      steps: steps run.
    """

    def __init__(self, policy: Policy, *, num_pages: int, page_size: int = 4, seqs: int = 8, tokens: int = 32) -> None:
        config = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens)
        self.now = 0.0
        self.num_pages = num_pages
        self.scheduler = Scheduler(
            config, page_size=page_size, policy=policy, prefix_caching=False, clock=lambda: self.now
        )
        self.owned: dict[Sequence, int] = {}
        self.admitted: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.steps = self.preemptions = 0
        self._ranks = itertools.count()

    @property
    def unowned(self) -> int:
        return self.num_pages - sum(self.owned.values())

    def add(self, prompt: int, grow: int, **fields) -> Sequence:
        """Queue a request of `prompt` tokens that generates `grow`."""
        rank = next(self._ranks)
        request = Request(str(rank), (rank + 1,) * prompt, SamplingParams(max_tokens=grow), **fields)
        sequence = Sequence.start(request, index=0, rank=rank, max_total=prompt + grow, namespace=0)
        self.scheduler.add(sequence)
        return sequence

    def admit(self) -> None:
        while chosen := self.scheduler.candidates(self.unowned, ADMIT_AT_ONCE):
            for sequence, row in chosen:
                if not self.scheduler.accept(sequence, row, 0, self.unowned):
                    return
                self.owned[sequence] = 0
                if sequence.num_preemptions == 0:
                    self.admitted.append(sequence)

    def step(self) -> None:
        """Admit, then one step over everybody that runs."""
        self.admit()
        plan = self.scheduler.plan()
        if plan is None:
            return
        self.steps += 1
        lanes = plan.lanes
        while self.scheduler.pages_needed(lanes) > self.unowned:
            victim = self.scheduler.victim()
            del self.owned[victim]
            self.scheduler.preempt([victim])
            self.preemptions += 1
            lanes = [(s, q) for s, q in lanes if s is not victim]
        for sequence, q in lanes:
            sequence.num_computed += q
            self.owned[sequence] = self.scheduler.footprint.logical(sequence.num_computed)
            if sequence.num_computed == sequence.num_tokens:
                sequence.append([1])
            sequence.update_phase()
            if sequence.num_tokens == sequence.max_total:
                del self.owned[sequence]
                self.scheduler.remove(sequence)
                sequence.phase, sequence.row = Phase.ENDED, None
                self.finished.append(sequence)
        assert self.unowned >= 0

    def run(self, max_steps: int = 20_000) -> None:
        """Until nothing is left."""
        for _ in range(max_steps):
            if not (self.scheduler.waiting or self.scheduler.running):
                return
            self.step()
        raise AssertionError("the scheduler does not come to an end")
