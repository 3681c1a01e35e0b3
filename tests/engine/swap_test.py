"""Preemption by swap, and spilled pages: the same tokens as if nothing had happened, and no page lost on either side."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import Request
from pagedjax.engine.llm import merge
from pagedjax.engine.preemption import PreemptionCost
from pagedjax.errors import ConfigError
from tests.engine.tiny import assert_clean, greedy, make_engine, params, random_prompts, run, tokens

PROMPTS = random_prompts(5, 3, 40, seed=11)


def swapping(**options):
    return make_engine(**{"cache__host_pages": 64, "scheduler__preemption": "swap", **options})


def preempt(engine, count=1):
    """The youngest running sequences lose their rows, between two steps."""
    engine._land_all()
    for _ in range(count):
        if engine._scheduler.running:
            engine._preempt()


def run_preempting(engine, prompts, sampling, every, count=1):
    """As `run`, but every so many steps the youngest running sequences lose their rows."""
    many = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
    done = {}
    for i, (prompt, one) in enumerate(zip(prompts, many, strict=True)):
        engine.add_request(Request(str(i), prompt, one))
    for step in range(1, 2000):
        for delta in engine.step():
            done[delta.request_id] = merge(done.get(delta.request_id), delta)
        if not engine.has_unfinished():
            return [done[str(i)] for i in range(len(prompts))]
        if step % every == 0:
            preempt(engine, count)
    raise AssertionError("the engine does not come to an end")


def assert_nothing_left(engine):
    """Both sides: rows and pages of the device, and pages of the host (cached ones may stay where pages spill)."""
    assert_clean(engine)
    tier = engine._tier
    tier.collect()
    assert tier.saved == {}
    assert all(holders == 0 for _, _, holders in tier.index.entries())
    assert tier.num_used == (tier.index.num_cached if engine.config.cache.spill else 0)


def count_computed(engine):
    """A list whose sum is the number of tokens that steps have computed."""
    computed = []
    mixed, decode = engine.runner.mixed, engine.runner.finish_decode

    def counting_mixed(lanes):
        computed.extend(q for _, q in lanes)
        return mixed(lanes)

    def counting_decode(flight):
        trap, results = decode(flight)
        computed.extend(len(r.samples.tokens) for r in results)
        return trap, results

    engine.runner.mixed, engine.runner.finish_decode = counting_mixed, counting_decode
    return computed


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize(("every", "count"), [(1, 1), (2, 5)])
def test_swap_changes_no_token_and_computes_none_again(every, count, caching):
    engine = swapping(cache__prefix_caching=caching)
    computed = count_computed(engine)
    outputs = run_preempting(engine, PROMPTS, params(max_tokens=20), every, count)
    assert tokens(outputs) == [greedy(p, 20) for p in PROMPTS]
    assert sum(computed) == sum(len(p) + 20 - 1 for p in PROMPTS)
    assert engine.counters.preemptions > 3
    stats = engine.stats()
    assert stats.swapped_out_pages > 0
    # With the prefix cache, what is still in it comes from there.
    assert (stats.swapped_in_pages == stats.swapped_out_pages) != caching
    assert (stats.host_pages_used, stats.host_pages_total) == (0, 64)
    assert_nothing_left(engine)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_samples_penalties_and_logprobs_survive(mode):
    sampling = [
        params(max_tokens=25, temperature=1.0, seed=i, presence_penalty=1.0, repetition_penalty=1.3, logprobs=2)
        for i in range(4)
    ]
    sampling.append(params(max_tokens=20, n=3, temperature=0.9, seed=9, frequency_penalty=0.5, prompt_logprobs=1))
    calm, disturbed = make_engine(), swapping(scheduler__preemption=mode)
    expected = run(calm, PROMPTS, sampling)
    found = run_preempting(disturbed, PROMPTS, sampling, 3, 2)
    assert disturbed.counters.preemptions > 3
    for a, b in zip(expected, found, strict=True):
        assert [o.token_ids for o in a.outputs] == [o.token_ids for o in b.outputs]
        for x, y in zip(a.outputs, b.outputs, strict=True):
            chosen = [[e.chosen.logprob for e in o.logprobs or ()] for o in (x, y)]
            np.testing.assert_allclose(*chosen, atol=1e-4)
        assert len(a.prompt_logprobs or ()) == len(b.prompt_logprobs or ())
    assert (disturbed.stats().swapped_in_pages > 0) == (mode == "swap")
    assert_nothing_left(disturbed)


def row_content(engine, sequence):
    """Keys and values [L, num_computed, 2K, D] of a sequence, as they stand."""
    state = jax.device_get(engine.runner.state)
    size = engine.runner.page_size
    pages = state.pages.table[0, sequence.row, : -(-sequence.num_computed // size)]
    kv = state.cache.kv_pages[:, pages]
    return kv.reshape(kv.shape[0], -1, *kv.shape[3:])[:, : sequence.num_computed]


def test_pages_come_back_bitwise():
    engine = swapping(cache__prefix_caching=False)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(Request(str(i), prompt, params(max_tokens=40)))
    for _ in range(4):
        engine.step()
    engine._land_all()
    before = {s: row_content(engine, s) for s in engine._scheduler.running}
    preempt(engine, len(before))
    # What they had is overwritten, so that it can come from nowhere else.
    state = engine.runner.state
    state = state.replace(cache=jax.tree.map(lambda x: jnp.full(x.shape, 99, x.dtype), state.cache))
    engine.runner.load_state(state, num_unowned=engine.runner.num_unowned, num_page_copies=0)
    engine._admit()
    for sequence, content in before.items():
        assert sequence.num_computed == content.shape[1]
        np.testing.assert_array_equal(row_content(engine, sequence), content)
    while engine.has_unfinished():
        engine.step()
    assert_nothing_left(engine)


def test_prefilling_sequences_are_swapped_too():
    prompt = random_prompts(1, 200, 201, seed=3)[0]
    engine = swapping(cache__prefix_caching=False)
    computed = count_computed(engine)
    outputs = run_preempting(engine, [prompt], params(max_tokens=4), 2)
    assert tokens(outputs) == [greedy(prompt, 4)]
    assert sum(computed) == 203
    assert engine.counters.preemptions >= 3


def test_beams_are_swapped():
    prompts = random_prompts(2, 11, 30, seed=8)
    sampling = params(max_tokens=14, n=3, beam_width=3)
    calm, disturbed = make_engine(), swapping(cache__prefix_caching=False)
    expected = run(calm, prompts, sampling)
    found = run_preempting(disturbed, prompts, sampling, 4)
    assert disturbed.counters.swapped_in_pages > 0
    for a, b in zip(expected, found, strict=True):
        assert [o.token_ids for o in a.outputs] == [o.token_ids for o in b.outputs]
    assert_nothing_left(disturbed)


def test_a_full_host_pool_means_recompute():
    engine = swapping(cache__host_pages=3, cache__prefix_caching=False)
    computed = count_computed(engine)
    outputs = run_preempting(engine, PROMPTS, params(max_tokens=20), 2, 3)
    assert tokens(outputs) == [greedy(p, 20) for p in PROMPTS]
    assert sum(computed) > sum(len(p) + 20 - 1 for p in PROMPTS)
    assert engine.stats().swapped_out_pages > 0
    assert_nothing_left(engine)


def test_swapped_sequences_share_pages_of_a_common_past():
    """Three continuations of one prompt hold its full pages once on the host."""
    prompt = random_prompts(1, 32, 33, seed=4)[0]
    engine = swapping()
    engine.add_request(Request("r", prompt, params(n=3, temperature=1.0, seed=5, max_tokens=30)))
    for _ in range(3):
        engine.step()
    engine._land_all()
    running = list(engine._scheduler.running)
    assert len(running) == 3
    own = sum(-(-s.num_computed // 8) - 4 for s in running)
    preempt(engine, 3)
    assert engine.stats().host_pages_used == 4 + own
    engine.abort("r")
    assert engine.stats().host_pages_used == 0
    assert_nothing_left(engine)


def test_a_sequence_that_finds_no_room_on_the_host_holds_nothing_there():
    engine = swapping(cache__host_pages=5)
    engine.add_request(Request("r", random_prompts(1, 32, 33, seed=4)[0], params(n=3, temperature=1.0, max_tokens=30)))
    while not engine._scheduler.running or engine._scheduler.running[-1].num_computed <= 32:
        engine.step()
    assert len(engine._scheduler.running) == 3
    preempt(engine, 3)  # the first takes five pages; the others would share four of them, and need one more each
    assert [s.index for s in engine._tier.saved] == [2]
    assert {holders for _, _, holders in engine._tier.index.entries()} == {1}
    engine.abort("r")
    assert_nothing_left(engine)


def test_aborts_while_swapped_out():
    engine = swapping(cache__num_pages=11)
    rng = np.random.default_rng(6)
    alive = []
    for i in range(40):
        prompt = random_prompts(1, 1, 50, seed=200 + i)[0]
        engine.add_request(Request(f"r{i}", prompt, params(max_tokens=int(rng.integers(1, 25)))))
        alive.append(f"r{i}")
        engine.step()
        if rng.random() < 0.5:
            preempt(engine)
        if rng.random() < 0.5:
            engine.abort(alive.pop(int(rng.integers(len(alive)))))
    assert engine.counters.swapped_out_pages > 0
    while engine.has_unfinished():
        engine.step()
    assert_nothing_left(engine)


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_two_that_each_need_most_of_the_pool_come_to_an_end(mode):
    """A05, mission M3.9: 56 of 80 tokens each. The first is never robbed, the second a bounded number of times."""
    prompts = random_prompts(2, 9, 10, seed=7)
    engine = make_engine(cache__num_pages=11, cache__host_pages=16, scheduler__preemption=mode)
    for i, prompt in enumerate(prompts):
        engine.add_request(Request(str(i), prompt, params(max_tokens=47)))
    sequences = [engine._in_flight.groups[str(i)].continuations[0].sequence for i in range(2)]
    outputs = {}
    while engine.has_unfinished():
        for delta in engine.step():
            outputs[delta.request_id] = merge(outputs.get(delta.request_id), delta)
    assert tokens([outputs["0"], outputs["1"]]) == [greedy(p, 47) for p in prompts]
    assert sequences[0].num_preemptions == 0
    assert 1 <= sequences[1].num_preemptions <= 3
    if mode != "auto":
        assert (engine.counters.swapped_in_pages > 0) == (mode == "swap")
    assert_nothing_left(engine)


def test_the_cheaper_way_is_taken():
    assert not PreemptionCost(None, 1.0, 1.0).swap_is_cheaper(100, 1, 1)
    assert not PreemptionCost(1.0, None, None).swap_is_cheaper(100, 1, 1)
    assert PreemptionCost(1.0, 2.0, 3.0).swap_is_cheaper(26, 5, 5)
    assert not PreemptionCost(1.0, 2.0, 3.0).swap_is_cheaper(25, 5, 5)
    assert PreemptionCost(1.0, 2.0, 3.0).swap_is_cheaper(25, 4, 5)
    for seconds, swaps in ((1e3, True), (0.0, False)):
        engine = make_engine(cache__host_pages=64, cache__prefix_caching=False)
        engine.add_request(Request("r", PROMPTS[0], params()))
        engine.step()
        engine.runner.mixed_rate.add(seconds, 1)
        if not seconds:
            engine.runner.mixed_rate._seconds = 0.0
        preempt(engine)
        assert (engine.counters.swapped_out_pages > 0) == swaps
        engine.abort("r")
        assert_nothing_left(engine)


def spilling(**options):
    return swapping(**{"cache__num_pages": 11, "cache__host_pages": 40, "cache__spill": True, **options})


def test_cached_pages_spill_and_are_revived():
    engine = spilling()
    prompts = random_prompts(6, 41, 42, seed=30)
    for prompt in prompts:  # each needs six of the ten pages
        assert tokens(run(engine, [prompt], params(max_tokens=6))) == [greedy(prompt, 6)]
    assert engine.counters.spilled_pages >= 20
    before = engine.counters.revived_pages
    out = run(engine, [prompts[0]], params(max_tokens=6))
    assert tokens(out) == [greedy(prompts[0], 6)]
    assert out[0].num_cached_tokens == 40
    assert engine.counters.revived_pages - before == 5
    longer = (*prompts[1], *out[0].outputs[0].token_ids)
    assert run(engine, [longer], params(max_tokens=2))[0].num_cached_tokens == 40
    other = run(engine, [prompts[2]], params(max_tokens=2), cache_salt="x")
    assert other[0].num_cached_tokens == 0
    unread = run(engine, [prompts[3]], params(max_tokens=2), read_prefix_cache=False)
    assert unread[0].num_cached_tokens == 0
    assert_nothing_left(engine)


def test_a_page_that_was_recycled_meanwhile_is_not_mistaken():
    engine = spilling()
    run(engine, random_prompts(1, 41, 42, seed=30), params(max_tokens=6))
    known = engine._tier.published.entries()
    for i, (page, generation, _) in enumerate(known):
        engine._tier.published.note(page, generation - i % 2, bytes([i]))
    engine._tier.spill()
    engine._tier.collect()
    assert len(known) == 5
    assert [bytes([i]) in engine._tier.index for i in range(5)] == [True, False, True, False, True]


def test_the_last_prompt_token_is_never_revived():
    engine = spilling()
    prompt = random_prompts(1, 40, 41, seed=31)[0]
    run(engine, [prompt], params(max_tokens=6))
    for other in random_prompts(4, 41, 42, seed=32):
        run(engine, [other], params(max_tokens=6))
    out = run(engine, [prompt], params(max_tokens=6))
    assert out[0].num_cached_tokens == 32
    assert tokens(out) == [greedy(prompt, 6)]


def test_the_least_recently_used_spilled_pages_go_first():
    engine = spilling(cache__host_pages=15)
    prompts = random_prompts(6, 41, 42, seed=33)
    for prompt in (*prompts[:3], prompts[0], *prompts[3:5]):
        run(engine, [prompt], params(max_tokens=6))
        assert engine.stats().host_pages_used <= 15
    assert run(engine, [prompts[0]], params(max_tokens=1))[0].num_cached_tokens > 0
    assert run(engine, [prompts[1]], params(max_tokens=1))[0].num_cached_tokens == 0
    assert_nothing_left(engine)


def test_everything_at_once():
    """Small pools on both sides, shared prefixes, samples, preemptions, spills, aborts."""
    engine, calm = spilling(cache__host_pages=12), make_engine()
    rng = np.random.default_rng(50)
    prefixes = random_prompts(3, 16, 17, seed=51)
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


def test_no_compilation_after_warm_up():
    engine = spilling(runner__warm_up=True, runner__check_every=0)
    run_preempting(engine, PROMPTS, params(max_tokens=20), 3)
    assert engine.counters.swapped_in_pages > 0
    assert engine.stats().compilations_after_warm_up == 0


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"scheduler__preemption": "swap"}, "config.cache.host_pages"),
        ({"cache__spill": True}, "config.cache.spill"),
        ({"cache__spill": True, "cache__host_pages": 4, "cache__prefix_caching": False}, "config.cache.spill"),
        ({"cache__host_pages": -1}, "config.cache.host_pages"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, name):
    with pytest.raises(ConfigError, match=name):
        make_engine(**options)
