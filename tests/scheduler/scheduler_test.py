"""Queues and page counts, without a device."""

from __future__ import annotations

from pagedjax import Request, SamplingParams
from pagedjax.config import SchedulerConfig
from pagedjax.policy import by_priority, first_come
from pagedjax.scheduler import Phase, Scheduler, Sequence


def sequence(rank: int, *, prompt: int = 8, grow: int = 8, priority: int = 0, first: int | None = None) -> Sequence:
    """A waiting sequence whose prompt begins with `first` (by default, with its rank)."""
    ids = (rank if first is None else first,) * prompt
    request = Request(str(rank), ids, SamplingParams(), priority=priority)
    return Sequence.start(request, index=0, rank=rank, max_total=prompt + grow, namespace=0)


def make(policy=first_come, *, seqs: int = 4, tokens: int = 16, share: float = 0.0, caching: bool = True) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens, growth_share=share)
    return Scheduler(config, page_size=4, policy=policy, prefix_caching=caching)


def admit(scheduler: Scheduler, pages: int, width: int = 8) -> list[Sequence]:
    return [s for s, row in scheduler.candidates(pages, width) if scheduler.accept(s, row, 0, pages)]


def test_first_come_first_served_and_by_priority():
    many = [sequence(i, priority=p) for i, p in enumerate((5, 5, -1))]
    for policy, order in ((first_come, [0, 1, 2]), (by_priority, [2, 0, 1])):
        scheduler = make(policy)
        for s in reversed(many):
            scheduler.add(s)
        assert [s.rank for s, _ in scheduler.candidates(100, 8)] == order


def test_admission_leaves_the_pages_that_running_sequences_need():
    scheduler = make()
    for i in range(3):
        scheduler.add(sequence(i))  # 9 known tokens and the next: three pages each
    assert [s.rank for s in admit(scheduler, 7)] == [0, 1]
    assert scheduler.blocked
    assert scheduler.candidates(7, 8) == []  # nothing was given back since
    scheduler.remove(scheduler.running[0])
    assert [s.rank for s in admit(scheduler, 7)] == [2]


def test_alone_there_is_always_room():
    scheduler = make(share=1.0)
    scheduler.add(sequence(0, grow=100))
    assert len(admit(scheduler, 2)) == 1


def test_a_prefix_that_is_being_computed_is_waited_for():
    scheduler = make()
    for rank, first in ((0, 7), (1, 7), (2, 8)):
        scheduler.add(sequence(rank, first=first))
    assert [s.rank for s in admit(scheduler, 100)] == [0, 2]
    leader = scheduler.running[0]
    assert admit(scheduler, 100) == []
    leader.num_computed = leader.num_published = 8
    assert [s.rank for s in admit(scheduler, 100)] == [1]
    without = make(caching=False)
    for rank in range(2):
        without.add(sequence(rank, first=7))
    assert len(admit(without, 100)) == 2


def test_chunks_fill_the_step_after_those_that_decode():
    scheduler = make(tokens=10)
    for rank in range(3):
        scheduler.add(sequence(rank))
    first, second, third = admit(scheduler, 100)
    first.num_computed = 7
    first.update_phase()
    plan = scheduler.plan()
    assert not plan.is_decode
    assert [(s.rank, n) for s, n in plan.lanes] == [(0, 1), (1, 8), (2, 1)]
    assert scheduler.pages_needed(plan.lanes) == 0 + 2 + 1
    for s in (second, third):
        s.num_computed = 7
        s.update_phase()
    assert scheduler.plan().is_decode


def test_the_youngest_yields_and_keeps_its_place():
    scheduler = make()
    for rank in range(3):
        scheduler.add(sequence(rank))
    admit(scheduler, 100)
    victim = scheduler.victim()
    assert victim.rank == 2
    scheduler.add(sequence(3))
    victim.append([1, 2])
    scheduler.preempt(victim)
    assert (victim.phase, victim.row, victim.num_computed, victim.num_tokens) == (Phase.WAITING, None, 0, 10)
    assert [s.rank for s in scheduler.waiting] == [2, 3]
