"""Models with windows and a host pool: preemption by swap, spilled pages, snapshots. The same tokens as without any of it.

Pages are of 4 tokens and windows of 12; three kinds of models: four groups of which three see a window, two groups, one
group that sees a window.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import Request
from pagedjax.engine import diff_states, restore_engine
from pagedjax.engine.host_places import Place, needed, reaches
from pagedjax.engine.llm import merge
from pagedjax.pages.capacity import Footprint
from pagedjax.scheduler import Sequence
from tests.engine.hybrid_test import (
    ALL_WINDOWED,
    HYBRID,
    PAGE,
    TWO_GROUPS,
    WINDOW,
    assert_greedy,
    make_engine,
    model,
    poison,
)
from tests.engine.swap_test import assert_nothing_left, count_computed, preempt, run_preempting
from tests.engine.tiny import params, random_prompts, run, share_programs, tokens

SPECS = {"four groups": HYBRID, "two groups": TWO_GROUPS, "one group": ALL_WINDOWED}
PROMPTS = random_prompts(5, 3, 60, seed=71)


@pytest.fixture(params=SPECS, scope="module")  # so that all tests of one kind share compiled programs
def spec(request):
    return SPECS[request.param]


def swapping(spec, **options):
    return make_engine(spec, **{"cache__host_pages": 160, "scheduler__preemption": "swap", **options})


def spilling(spec, **options):
    groups = len(spec.groups.windows)
    defaults = {"cache__num_pages": 1 + 20 * groups, "cache__host_pages": 150 * groups, "cache__spill": True}
    return swapping(spec, **{**defaults, **options})


def test_how_far_given_pages_reach():
    """Against every end tried by its definition, over random gaps."""
    rng = np.random.default_rng(0)
    longest = 0
    for _ in range(300):
        windows = tuple(int(w) for w in rng.choice([0, 1, 3, 8, 13], rng.integers(1, 4)))
        footprint, start, end = Footprint(PAGE, windows), int(rng.integers(0, 4)), int(rng.integers(0, 14))
        there = rng.random((len(windows), 14)) < 0.9
        expected = [
            m for m in range(end, start, -1) if all(there[place] for place in needed(footprint, m * PAGE, start))
        ]
        assert list(reaches(footprint, lambda place, there=there: there[place], start, end)) == expected
        longest = max([longest, *expected])
    assert longest > 10
    # Token 10 of a window of 6 sees 5 to 10.
    assert needed(Footprint(4, (0, 6)), 10) == [(0, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert needed(Footprint(4, (0, 6)), 12, 2) == [(0, 2), (1, 2)]


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize(("every", "count"), [(1, 1), (2, 5)])
def test_swap_changes_no_token_and_computes_none_again(spec, every, count, caching):
    engine = swapping(spec, steps=3, cache__prefix_caching=caching)
    computed = count_computed(engine)
    outputs = tokens(run_preempting(engine, PROMPTS, params(max_tokens=20), every, count))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_greedy(prompt, output, spec)
    assert outputs == tokens(run(make_engine(spec), PROMPTS, params(max_tokens=20)))
    assert sum(computed) == sum(len(p) + 20 - 1 for p in PROMPTS)
    assert engine.counters.preemptions > 3
    # One group alone finds all on the device that is still cached there, the unfilled last page too.
    assert (engine.counters.swapped_in_pages > 0) != (caching and spec is ALL_WINDOWED)
    assert_nothing_left(engine)


def test_a_pool_too_small_for_all(spec):
    """Nobody preempts by hand: pages run out."""
    engine = spilling(spec, scheduler__growth_share=0.0, cache__spill=False, cache__prefix_caching=False)
    prompts = random_prompts(8, 4, 12, seed=9)
    for prompt, output in zip(prompts, tokens(run(engine, prompts, params(max_tokens=50))), strict=True):
        assert_greedy(prompt, output, spec)
    assert engine.counters.swapped_in_pages > 0
    assert_nothing_left(engine)


def test_samples_penalties_and_logprobs_survive(spec):
    sampling = [
        params(max_tokens=25, temperature=1.0, seed=i, presence_penalty=1.0, repetition_penalty=1.3, logprobs=2)
        for i in range(4)
    ]
    sampling.append(params(max_tokens=20, n=3, temperature=0.9, seed=9, frequency_penalty=0.5, prompt_logprobs=1))
    calm, disturbed = make_engine(spec), swapping(spec, steps=5)
    expected = run(calm, PROMPTS, sampling)
    found = run_preempting(disturbed, PROMPTS, sampling, 2, 2)
    for a, b in zip(expected, found, strict=True):
        assert [o.token_ids for o in a.outputs] == [o.token_ids for o in b.outputs]
        for x, y in zip(a.outputs, b.outputs, strict=True):
            chosen = [[e.chosen.logprob for e in o.logprobs or ()] for o in (x, y)]
            np.testing.assert_allclose(*chosen, atol=1e-4)
        assert len(a.prompt_logprobs or ()) == len(b.prompt_logprobs or ())
    assert disturbed.counters.swapped_in_pages > 0
    assert_nothing_left(disturbed)


def start(engine, prompt, max_tokens):
    """A request in flight; its sequence, and a list that collects what `until` sees of it."""
    engine.add_request(Request("r", tuple(prompt), params(max_tokens=max_tokens)))
    return engine._in_flight.groups["r"].continuations[0].sequence, []


def until(engine, ids, done):
    """Steps until `done()`, with free pages full of NaN."""
    while not done():
        poison(engine)
        for out in engine.step():
            ids += out.outputs[0].token_ids


def forget_device_pages(engine):
    """What the device has cached is gone: only the host has it."""
    state = engine.runner.state
    gone = jnp.zeros_like(state.pages.parent)
    state = state.replace(pages=state.pages.replace(parent=gone))
    engine.runner.load_state(state, num_unowned=engine.runner.num_unowned, num_page_copies=0)


@pytest.mark.parametrize("at", [1, PAGE - 1, PAGE, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 3 * WINDOW + 2])
def test_preempted_at_every_place_of_the_window(spec, at):
    """Preempted with `at` tokens computed, and again four tokens later. What it had is on the host only."""
    prompt = (
        random_prompts(1, 2, 3, seed=77)[0] if at < 2 else random_prompts(1, min(at, 30), min(at, 30) + 1, seed=at)[0]
    )
    engine = swapping(spec, steps=1, runner__overlap=False)
    computed = count_computed(engine)
    sequence, ids = start(engine, prompt, 60)
    for num in (max(at, len(prompt)), max(at, len(prompt)) + 4):
        until(engine, ids, lambda num=num: sequence.num_computed >= num)
        assert sequence.num_computed == num
        preempt(engine)
        assert engine._tier.saved[sequence].num_computed == num
        seen = sum(-(-num // PAGE) - (max(num - w + 1, 0) // PAGE if w else 0) for w in spec.groups.windows)
        assert engine.stats().host_pages_used == seen
        forget_device_pages(engine)
    until(engine, ids, lambda: not engine.has_unfinished())
    assert_greedy(prompt, ids, spec)
    assert sum(computed) == len(prompt) + 60 - 1
    assert sequence.num_preemptions == 2
    assert_nothing_left(engine)


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_preempted_in_the_middle_of_a_prompt(spec, chunks):
    prompt = random_prompts(1, 150, 151, seed=72)[0]
    engine = swapping(spec, cache__prefix_caching=False)
    computed = count_computed(engine)
    sequence, ids = start(engine, prompt, 8)
    for more in (chunks, 1):
        target = sequence.num_computed + 32 * more
        until(engine, ids, lambda target=target: sequence.num_computed >= min(target, 150))
        preempt(engine)
    until(engine, ids, lambda: not engine.has_unfinished())
    assert_greedy(prompt, ids, spec)
    assert sum(computed) == 150 + 8 - 1
    assert_nothing_left(engine)


def test_what_the_device_still_has_is_not_brought_back(spec):
    """The cached prompt goes on with the host's pages, and what is behind the windows by then is given back."""
    prompt = random_prompts(1, 40, 41, seed=73)[0]
    engine = swapping(spec, steps=1, runner__overlap=False)
    sequence, ids = start(engine, prompt, 30)
    until(engine, ids, lambda: sequence.num_computed >= 40)
    until(engine, ids, lambda: sequence.num_computed >= 43)
    preempt(engine)
    engine._admit()
    assert sequence.num_computed == 43
    table = engine.runner.page_table()[:, sequence.row]
    first = engine._tier._footprint.first(43)
    for group, begin in enumerate(first):
        assert np.flatnonzero(table[group]).tolist() == list(range(begin, 11))
    # The last page of each group, unless the device has found that, too.
    assert engine.counters.swapped_in_pages == (0 if spec is ALL_WINDOWED else len(spec.groups.windows))
    until(engine, ids, lambda: not engine.has_unfinished())
    assert_greedy(prompt, ids, spec)
    assert_nothing_left(engine)


def test_a_row_that_lacks_a_page_is_not_saved(spec):
    engine = swapping(spec, steps=1, runner__overlap=False)
    sequence, ids = start(engine, PROMPTS[0], 20)
    until(engine, ids, lambda: sequence.num_computed > len(PROMPTS[0]))
    sequence.num_computed -= WINDOW  # now pages that it gave back would be seen
    sequence.num_tokens -= WINDOW
    assert not engine._tier.save(sequence)
    assert engine._tier.num_used == 0
    sequence.num_computed += WINDOW
    sequence.num_tokens += WINDOW
    until(engine, ids, lambda: not engine.has_unfinished())
    assert_greedy(PROMPTS[0], ids, spec)
    assert_nothing_left(engine)


def test_where_the_device_has_no_room_less_comes_back(spec):
    """The host's pages come back as far as the device has room; the rest is computed again."""
    prompt = random_prompts(1, 50, 51, seed=74)[0]
    engine = swapping(spec, steps=1, runner__overlap=False)
    sequence, ids = start(engine, prompt, 20)
    until(engine, ids, lambda: sequence.num_computed >= 55)
    preempt(engine)
    forget_device_pages(engine)
    tier = engine._tier
    whole = len(tier.saved[sequence].digests) + len(tier.saved[sequence].last_pages)
    room, found = engine.runner.num_unowned, set()
    for engine.runner.num_unowned in range(whole + 1):
        tokens_, places, pages = tier._continuation(sequence, tier.saved[sequence], 0)
        assert len(places) == len(pages) == len(set(places)) <= engine.runner.num_unowned
        found.add(tokens_)
    assert {0, 55} <= found
    engine.runner.num_unowned = room
    until(engine, ids, lambda: not engine.has_unfinished())
    assert_greedy(prompt, ids, spec)
    assert_nothing_left(engine)


def test_a_full_host_pool_means_recompute(spec):
    pages = 8 * len(spec.groups.windows)
    engine = swapping(spec, steps=3, cache__host_pages=pages, cache__prefix_caching=False)
    computed = count_computed(engine)
    outputs = run_preempting(engine, PROMPTS, params(max_tokens=20), 6, 3)
    for prompt, output in zip(PROMPTS, tokens(outputs), strict=True):
        assert_greedy(prompt, output, spec)
    assert sum(computed) > sum(len(p) + 20 - 1 for p in PROMPTS)
    assert engine.counters.swapped_out_pages > 0
    assert_nothing_left(engine)


def test_cached_pages_spill_and_are_revived(spec):
    engine = spilling(spec)
    prompts = random_prompts(8, 41, 42, seed=30)
    for prompt in prompts:
        assert_greedy(prompt, tokens(run(engine, [prompt], params(max_tokens=6)))[0], spec)
    assert engine.counters.spilled_pages > 0
    before = engine.counters.revived_pages
    out = run(engine, [prompts[0]], params(max_tokens=6))
    assert_greedy(prompts[0], out[0].outputs[0].token_ids, spec)
    assert out[0].num_cached_tokens == 40
    # Of the windowed groups only what the window shows.
    assert engine.counters.revived_pages - before == sum(3 if w else 10 for w in spec.groups.windows)
    other = run(engine, [prompts[2]], params(max_tokens=2), cache_salt="x")
    assert other[0].num_cached_tokens == 0
    unread = run(engine, [prompts[3]], params(max_tokens=2), read_prefix_cache=False)
    assert unread[0].num_cached_tokens == 0
    assert_nothing_left(engine)


def break_chains(engine):
    """The device's index has lost the second page of every prefix, and so all that comes after it."""
    state = engine.runner.state
    second = (state.pages.parent > 0) & (state.pages.parent < state.pages.total_pages)
    links = jnp.where(second, state.pages.parent_generation + jnp.uint32(1000), state.pages.parent_generation)
    state = state.replace(pages=state.pages.replace(parent_generation=links))
    engine.runner.load_state(state, num_unowned=engine.runner.num_unowned, num_page_copies=0)


def test_what_lies_behind_a_lost_page_comes_from_the_device(spec):
    engine = spilling(spec)
    prompt = random_prompts(1, 41, 42, seed=34)[0]
    first = tokens(run(engine, [prompt], params(max_tokens=6)))[0]
    break_chains(engine)
    engine._tier.collect()
    before = engine.counters.spilled_pages  # of what the windows have left behind, column 7 is needed again
    engine.add_request(Request("r", prompt, params(max_tokens=6)))
    engine._admit()
    assert engine.counters.revived_pages == sum(3 if w else 9 for w in spec.groups.windows)
    assert engine.counters.spilled_pages - before == sum(2 if w else 9 for w in spec.groups.windows)
    ids = []
    until(engine, ids, lambda: not engine.has_unfinished())
    assert ids == first
    assert_nothing_left(engine)


@pytest.mark.parametrize("what", ["generation", "parent"])
def test_what_the_device_has_no_more_is_not_fetched(spec, what):
    engine = spilling(spec)
    prompt = random_prompts(1, 41, 42, seed=34)[0]
    first = tokens(run(engine, [prompt], params(max_tokens=6)))[0]
    break_chains(engine)
    sequence = Sequence.start(Request("r", prompt, params()), index=0, rank=0, max_total=42, namespace=0)
    lost, _ = engine._tier.published.page(engine._tier._digest_of(sequence, 10)(Place(0, 9)))
    pages = engine.runner.state.pages
    values = getattr(pages, what)
    changed = values.at[lost].set(0 if what == "parent" else values[lost] + 1)
    state = engine.runner.state.replace(pages=pages.replace(**{what: changed}))
    engine.runner.load_state(state, num_unowned=engine.runner.num_unowned, num_page_copies=0)
    out = run(engine, [prompt], params(max_tokens=6))
    assert out[0].num_cached_tokens == 36
    assert out[0].outputs[0].token_ids == first
    assert_nothing_left(engine)


def test_a_host_pool_too_small_for_what_would_be_fetched(spec):
    engine = spilling(spec, cache__host_pages=2)
    prompt = random_prompts(1, 41, 42, seed=34)[0]
    first = tokens(run(engine, [prompt], params(max_tokens=6)))[0]
    break_chains(engine)
    out = run(engine, [prompt], params(max_tokens=6))
    assert out[0].num_cached_tokens == {1: 12, 2: 8, 4: 4}[len(spec.groups.windows)]  # the first page, and two more
    assert out[0].outputs[0].token_ids == first
    assert_nothing_left(engine)


def test_everything_at_once(spec):
    """Small pools on both sides, shared prefixes, samples, preemptions, spills, aborts; free pages are full of NaN."""
    groups = len(spec.groups.windows)
    engine, calm = spilling(spec, cache__host_pages=24 * groups, steps=4), make_engine(spec)
    step = engine.step

    def poisoned_step():
        poison(engine)
        return step()

    engine.step = poisoned_step
    rng = np.random.default_rng(50)
    prefixes = random_prompts(3, 24, 25, seed=51)
    for round_ in range(6):
        prompts = [prefixes[rng.integers(3)] + q for q in random_prompts(5, 1, 20, seed=52 + round_)]
        sampling = [
            params(max_tokens=int(rng.integers(2, 30)), temperature=float(i % 2), seed=i, presence_penalty=0.5)
            for i in range(5)
        ]
        engine.add_request(Request("gone", prompts[0], params(max_tokens=30)))
        engine.step()
        found = run_preempting(engine, prompts, sampling, int(rng.integers(2, 5))) if round_ % 2 else None
        engine.abort("gone")
        found = found or run(engine, prompts, sampling)
        assert tokens(found) == tokens(run(calm, prompts, sampling))
        assert_nothing_left(engine)
    assert engine.counters.revived_pages > 0
    assert engine.counters.swapped_in_pages > 0


def test_forks_and_beams_are_swapped(spec):
    prompts = random_prompts(2, 11, 40, seed=8)
    for sampling in (params(max_tokens=14, n=3, beam_width=3), params(max_tokens=30, n=3, temperature=1.0, seed=4)):
        # Three beams of 54 tokens, each in pages of its own at worst.
        options = {"cache__prefix_caching": False, "cache__num_pages": 1 + 48 * len(spec.groups.windows)}
        calm, disturbed = make_engine(spec, **options), swapping(spec, steps=4, **options)
        expected = run(calm, prompts, sampling)
        found = run_preempting(disturbed, prompts, sampling, 3)
        for a, b in zip(expected, found, strict=True):
            assert [o.token_ids for o in a.outputs] == [o.token_ids for o in b.outputs]
        assert disturbed.counters.swapped_in_pages > 0
        assert_nothing_left(disturbed)


def test_a_snapshot_with_swapped_out_sequences_goes_on(spec, tmp_path):
    engine = spilling(spec, steps=3)
    run(engine, random_prompts(3, 20, 60, seed=61), params(max_tokens=4))
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(Request(str(i), prompt, params(max_tokens=30, temperature=1.0, seed=i)))
    before = {}
    for _ in range(6):
        for delta in engine.step():
            before[delta.request_id] = merge(before.get(delta.request_id), delta)
    preempt(engine, 2)
    assert any(saved.last_pages for saved in engine._tier.saved.values())
    engine.save(tmp_path / "s")
    restored = share_programs(restore_engine(tmp_path / "s", model(spec), progress=False))
    assert diff_states(restored.runner.state, engine.runner.state) is None
    outputs = []
    for each in (engine, restored):
        each.runner.steps_within = lambda *_: 3
        ids = {name: list(out.outputs[0].token_ids) for name, out in before.items()}
        while each.has_unfinished():
            for out in each.step():
                ids.setdefault(out.request_id, []).extend(out.outputs[0].token_ids)
        outputs.append(ids)
        assert_nothing_left(each)
    assert outputs[0] == outputs[1]
    assert diff_states(restored.runner.state, engine.runner.state) is None
    assert restored.counters == engine.counters
    calm = make_engine(spec)
    sampling = [params(max_tokens=30, temperature=1.0, seed=i) for i in range(len(PROMPTS))]
    expected = tokens(run(calm, PROMPTS, sampling))
    assert [outputs[0][str(i)] for i in range(len(PROMPTS))] == expected


def test_no_compilation_after_warm_up():
    engine = spilling(TWO_GROUPS, runner__warm_up=True, runner__check_every=0)
    run_preempting(engine, PROMPTS[:3], params(max_tokens=12), 3)
    assert engine.counters.swapped_in_pages > 0
    assert engine.stats().compilations_after_warm_up == 0
