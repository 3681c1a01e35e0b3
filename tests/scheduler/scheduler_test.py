"""Queues and page counts, without a device."""

from __future__ import annotations

from pagedjax.policy import by_priority, first_come
from pagedjax.scheduler import Phase, Scheduler, Sequence
from tests.scheduler.machine import make, sequence


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


def test_who_comes_before_the_one_that_found_no_room_is_tried():
    scheduler = make(by_priority)
    for i in range(3):
        scheduler.add(sequence(i))
    assert len(admit(scheduler, 7)) == 2
    assert scheduler.blocked
    scheduler.add(sequence(3, priority=1))
    assert scheduler.candidates(7, 8) == []
    scheduler.add(sequence(4, priority=-1, prompt=2))
    assert [s.rank for s, _ in scheduler.candidates(7, 8)] == [4]
    scheduler.remove(next(s for s in scheduler.waiting if s.rank == 2))  # the one that was refused goes away
    assert not scheduler.blocked
    assert [s.rank for s, _ in scheduler.candidates(7, 8)] == [4, 3]


def test_layer_groups_take_a_page_each_and_windows_bound_them():
    """107 tokens are 27 pages in the full group; a window of 8 with a chunk of 16 lies in at most 7."""
    for pages, admitted in ((81, [0]), (82, [0, 1])):
        scheduler = make(share=1.0, windows=(0, 8, 8))
        scheduler.add(sequence(0, grow=100))
        scheduler.add(sequence(1, grow=100))
        assert [s.rank for s in admit(scheduler, pages)] == admitted
    s = scheduler.running[0]
    assert scheduler.pages_needed([(s, 8)]) == 6
    s.num_computed, s.shares_last_page = 8, True
    assert scheduler.pages_needed([(s, 1)]) == 6
    # While it decodes its windows need 3 pages each, of which it holds two.
    s.num_tokens, s.shares_last_page, s.phase = 9, False, Phase.DECODE
    assert scheduler._outstanding([s]) == 25 + 1 + 1


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


def test_who_yielded_does_not_come_back_before_somebody_ends():
    scheduler = make(by_priority)
    for rank in range(4):
        scheduler.add(sequence(rank))
    admit(scheduler, 100)
    for rank in (2, 3):  # the order in which they yield does not matter
        scheduler.preempt([next(s for s in scheduler.running if s.rank == rank)])
    assert scheduler.candidates(100, 8) == []
    scheduler.add(sequence(4))
    assert scheduler.candidates(100, 8) == []
    scheduler.add(sequence(5, priority=-1))
    assert [s.rank for s, _ in scheduler.candidates(100, 8)] == [5]
    scheduler.remove(scheduler.running[0])
    assert [s.rank for s, _ in scheduler.candidates(100, 8)] == [5, 2, 3]
    admit(scheduler, 100, width=1)
    for s in list(scheduler.running):
        scheduler.preempt([s])
    assert [s.rank for s, _ in scheduler.candidates(100, 8)] == [5, 1, 2, 3]  # nobody runs: nobody is robbed


def test_beams_whose_siblings_wait_for_them_go_first():
    scheduler = make(by_priority)
    first, second = sequence(0, priority=1), sequence(1, priority=1)
    second.request = first.request  # two beams of one search
    scheduler.add(first)
    admit(scheduler, 100)
    scheduler.add(second)
    scheduler.add(sequence(2, priority=0))
    assert [s.rank for s, _ in scheduler.candidates(100, 8)] == [2, 1]
    first.held = True
    assert [s.rank for s, _ in scheduler.candidates(100, 8)] == [1, 2]


def test_the_youngest_yields_and_keeps_its_place():
    scheduler = make()
    for rank in range(3):
        scheduler.add(sequence(rank))
    admit(scheduler, 100)
    victim = scheduler.victim()
    assert victim.rank == 2
    scheduler.add(sequence(3))
    victim.append([1, 2])
    scheduler.preempt([victim])
    assert (victim.phase, victim.row, victim.num_computed, victim.num_tokens) == (Phase.WAITING, None, 0, 10)
    scheduler.remove(scheduler.running[0])
    assert [s.rank for s, _ in scheduler.candidates(100, 8)] == [2, 3]


def test_nobody_is_admitted_between_a_preemption_and_an_end():
    """Else two could take the same pages from each other for ever."""
    scheduler = make()
    for rank in range(3):
        scheduler.add(sequence(rank))
    first, second, third = admit(scheduler, 100)
    scheduler.preempt([third])
    assert admit(scheduler, 100) == []
    scheduler.preempt([second])
    assert admit(scheduler, 100) == []
    scheduler.remove(first)
    assert admit(scheduler, 100) == [second, third]
    # Beams that wait for one another cannot end before the rest of them is admitted.
    second.held = True
    scheduler.preempt([third])
    assert admit(scheduler, 100) == [third]
