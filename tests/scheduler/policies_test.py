"""What each policy promises, over a machine without a device: fairness, no starvation, deadlines, an end to preemption."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.policy import (
    AGING_TOKENS,
    OUTPUT_WEIGHT,
    POLICIES,
    PROMPT_WEIGHT,
    earliest_deadline,
    fair_share,
    first_come,
    shortest_prefix,
)
from pagedjax.policy.scores import Features
from pagedjax.scheduler.features import SequenceFeatures
from tests.scheduler.machine import Machine, make, sequence

every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def served(finished_or_running, tenant):
    """Weighted tokens of a tenant, counted from the sequences themselves."""
    return sum(
        PROMPT_WEIGHT * s.prompt_len * s.is_charged + OUTPUT_WEIGHT * s.num_generated
        for s in finished_or_running
        if s.request.tenant == tenant
    )


# Fair share


def apart(policy, steps=3000):
    """The largest difference in service between two tenants that always wait, one with many long prompts, the other with
    fewer short ones, and what each was served in all."""
    machine = Machine(policy, num_pages=64)
    everything, worst = [], 0.0
    for _ in range(steps):
        waiting = [s.request.tenant for s in machine.scheduler.waiting]
        if waiting.count("heavy") < 30:
            everything += [machine.add(100, 20, tenant="heavy") for _ in range(10)]
        if waiting.count("light") < 10:
            everything += [machine.add(10, 30, tenant="light") for _ in range(2)]
        machine.step()
        totals = [served(everything, tenant) for tenant in ("heavy", "light")]
        worst = max(worst, abs(totals[0] - totals[1]))
    return worst, totals


def test_fair_share_keeps_tenants_that_always_wait_together():
    """Within the bound of the paper's theorem: twice the cost of one prompt or of all tokens the pool holds."""
    bound = 2 * max(PROMPT_WEIGHT * 100, OUTPUT_WEIGHT * 64 * 4)
    worst, totals = apart(fair_share)
    assert min(totals) > 10 * bound
    assert worst <= bound
    unfair, _ = apart(first_come)
    assert unfair > 5 * bound


def test_idle_time_is_not_saved_up():
    machine = Machine(fair_share, num_pages=64, seqs=1)
    for _ in range(200):
        machine.add(10, 10, tenant="busy")
    for _ in range(500):
        machine.step()
    machine.add(10, 10, tenant="late")
    late = [machine.add(10, 10, tenant="late") for _ in range(20)]
    begun = len(machine.admitted)
    while late[-1] not in machine.admitted:
        machine.step()
    since = [s.request.tenant for s in machine.admitted[begun:]]
    assert abs(since.count("busy") - since.count("late")) <= 2  # turn by turn, not all that it missed


def test_within_one_admission_tenants_take_turns():
    scheduler = make(fair_share, seqs=8)
    for rank in range(6):
        scheduler.add(sequence(rank, tenant="ab"[rank >= 4]))
    assert [s.rank for s, _ in scheduler.candidates(100, 8)] == [0, 4, 1, 5, 2, 3]


# Shortest prefix


def overtakers(machine, late):
    """Sequences that came after `late` and were admitted before it."""
    return [s for s in machine.admitted[: machine.admitted.index(late)] if s.rank > late.rank]


def flood(policy, long_prompt):
    """A long prompt, and one short prompt more each step than can be served."""
    machine = Machine(policy, num_pages=200, seqs=1)
    machine.add(4, 4)
    machine.step()
    long = machine.add(long_prompt, 4)
    for _ in range(400):
        machine.add(4, 4)
        machine.step()
    return machine, long


def test_shortest_prefix_starves_nobody():
    machine, long = flood(shortest_prefix, 30 * AGING_TOKENS)
    assert 20 <= len(overtakers(machine, long)) <= 30
    without_aging = lambda f: (f.num_tokens - f.num_computed).astype(np.float32)  # noqa: E731
    machine, long = flood(without_aging, 30 * AGING_TOKENS)
    assert long not in machine.admitted


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 300)), min_size=1, max_size=60),
    rows=st.integers(1, 4),
)
def test_shortest_prefix_is_overtaken_by_at_most_its_length_over_the_aging(arrivals, rows):
    """arrivals: (steps to wait before it comes, prompt tokens)."""
    machine = Machine(shortest_prefix, num_pages=400, seqs=rows)
    for gap, prompt in arrivals:
        machine.add(prompt, 5)
        for _ in range(gap % 4):
            machine.step()
    machine.run()
    assert machine.preemptions == 0
    for s in machine.admitted:
        assert len(overtakers(machine, s)) <= s.prompt_len / AGING_TOKENS


def test_prefill_chunks_go_in_policy_order():
    scheduler = make(shortest_prefix, tokens=10)
    for rank, prompt in enumerate((60, 6)):
        scheduler.add(sequence(rank, prompt=prompt))
    for s, row in scheduler.candidates(1000, 8):
        scheduler.accept(s, row, 0, 1000)
    assert [(s.rank, q) for s, q in scheduler.plan().lanes] == [(1, 6), (0, 4)]


def hit(known, one):
    (tokens,) = known.hits([one])
    return tokens


def test_shortest_prefix_counts_what_the_prefix_cache_has():
    scheduler = make(shortest_prefix, seqs=1, tokens=256)
    first = sequence(0, prompt=64, first=7)
    scheduler.add(first)
    ((_, row),) = scheduler.candidates(1000, 8)
    assert scheduler.accept(first, row, 0, 1000)
    first.num_computed = 64
    first.append([1])
    scheduler.remove(first)
    scheduler.add(sequence(1, prompt=40))
    scheduler.add(sequence(2, prompt=66, first=7))  # 64 of them are known
    ((follower, row),) = scheduler.candidates(1000, 1)
    assert follower.rank == 2
    features = SequenceFeatures(scheduler.waiting, scheduler._tenants, scheduler._known, 0.0)
    assert features.num_cached.tolist() == [64, 0]
    # The index has only eight of them left when it is asked: the guess is corrected, for others too.
    scheduler.accept(follower, row, 8, 1000)
    assert hit(scheduler._known, sequence(3, prompt=66, first=7)) == 8


def test_a_guess_covers_whole_pages_of_the_same_namespace_and_never_the_last_token():
    scheduler = make(shortest_prefix, seqs=4, tokens=256)
    hit(scheduler._known, sequence(9))  # from the first question on it remembers
    done = sequence(0, prompt=16, first=7)
    scheduler._known.note(done, 16)
    for prompt, namespace, expected in ((16, 0, 12), (17, 0, 16), (100, 0, 16), (100, 1, 0), (3, 0, 0)):
        s = sequence(1, prompt=prompt, first=7)
        s.namespace = namespace
        assert hit(scheduler._known, s) == expected
    assert hit(scheduler._known, sequence(2, prompt=100, first=7, read_prefix_cache=False)) == 0


def test_what_is_remembered_is_bounded_and_loses_tails_first():
    scheduler = make(shortest_prefix)
    known = scheduler._known
    known._max_pages = 6
    hit(known, sequence(9))
    old, new = sequence(0, prompt=17), sequence(1, prompt=17)
    known.note(old, 16)
    known.note(new, 16)
    assert (hit(known, old), hit(known, new)) == (8, 16)


# Deadlines


def test_the_nearest_deadline_goes_first_and_the_farthest_yields():
    machine = Machine(earliest_deadline, num_pages=100, seqs=3)
    for deadline in (None, 9.0, 3.0, 5.0):
        machine.add(4, 40, deadline=deadline)
        machine.now += 1
    machine.admit()
    assert [s.request.deadline for s in machine.admitted] == [3.0, 5.0, 9.0]
    assert machine.scheduler.victim().request.deadline == 9.0


# All of them


def random_load(machine, rng, num):
    for _ in range(num):
        machine.add(
            rng.randint(1, 60),
            rng.randint(1, 60),
            tenant=rng.choice("abc"),
            priority=rng.randint(-2, 2),
            deadline=rng.choice([None, rng.uniform(1, 100)]),
        )
        machine.now += 0.1
        if rng.random() < 0.7:
            machine.step()


@every_policy
def test_everybody_is_served_in_a_pool_that_is_too_small(policy):
    rng = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")
    machine = Machine(policy, num_pages=31)  # one row may need 30
    random_load(machine, rng, 200)
    machine.run()
    assert len(machine.finished) == 200
    assert machine.preemptions > 0


@every_policy
def test_two_that_need_most_of_the_pool_do_not_take_turns_at_preempting(policy):
    machine = Machine(policy, num_pages=20)
    machine.add(8, 48, tenant="a")
    machine.add(8, 48, tenant="b")
    machine.run()
    assert 1 <= machine.preemptions <= 3


@every_policy
def test_the_victim_is_the_last_in_policy_order(policy):
    rng = random.Random(seed := random.randrange(2**32))
    print(f"seed {seed}")
    machine = Machine(policy, num_pages=400, seqs=12)
    random_load(machine, rng, 12)
    machine.admit()
    running = machine.scheduler.running
    assert len(running) > 2
    features = SequenceFeatures(running, machine.scheduler._tenants, None, machine.now)
    scores = policy(features)
    worst = max(range(len(running)), key=lambda i: (scores[i], running[i].rank))
    assert machine.scheduler.victim() is running[worst]


def test_features_on_the_host_are_all_there_are():
    features = SequenceFeatures([sequence(5), sequence(3)], make()._tenants, None, 7.0)
    for name in Features._fields:
        assert getattr(features, name).shape == (2,), name
    assert features.arrival.tolist() == [2, 0]
    empty = SequenceFeatures([], make()._tenants, None, 7.0)
    assert [len(getattr(empty, name)) for name in Features._fields] == [0] * len(Features._fields)


@every_policy
def test_a_long_queue_is_ordered_at_once(policy):
    """4,096 wait: the policy is called once, on arrays, and only when somebody can be admitted."""
    calls = []

    def counting(features):
        calls.append(len(features.arrival))
        return policy(features)

    scheduler = make(counting, seqs=2, share=1.0)
    for rank in range(4096):
        scheduler.add(sequence(rank, prompt=40 + rank % 7, first=rank % 11, tenant=str(rank % 13)))
    started = time.perf_counter()
    chosen = scheduler.candidates(1000, 8)
    seconds = time.perf_counter() - started
    print(f"{seconds * 1e3:.1f} ms")
    assert calls == [4096]
    assert seconds < 1
    for s, row in chosen:
        scheduler.accept(s, row, 0, 1000)
    assert scheduler.candidates(1000, 8) == []  # no row is free
    assert calls == [4096]
