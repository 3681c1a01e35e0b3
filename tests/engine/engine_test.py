"""The engine on a tiny model against a numpy oracle: whatever the batch, chunks, pages, cache and preemptions."""

from __future__ import annotations

import numpy as np
import pytest

from pagedjax import Request, SamplingParams
from pagedjax.errors import InvalidRequestError, QueueFullError
from pagedjax.types import FinishReason
from tests.engine.tiny import (
    EOS,
    SPEC,
    assert_clean,
    greedy,
    make_engine,
    params,
    random_prompts,
    run,
    tensors,
    tokens,
)
from tests.oracles import llama_oracle

PROMPTS = random_prompts(12, 1, 60, seed=11)


@pytest.fixture(scope="module")
def engine():
    return make_engine()


@pytest.mark.smoke
def test_greedy_equals_the_oracle_all_at_once(engine):
    outputs = run(engine, PROMPTS, params())
    assert tokens(outputs) == [greedy(p, 12) for p in PROMPTS]
    assert all(out.outputs[0].finish_reason is FinishReason.LENGTH for out in outputs)
    assert_clean(engine)


@pytest.mark.parametrize(
    "options",
    [
        {"cache__page_size": 16, "scheduler__max_num_batched_tokens": 64, "runner__token_buckets": (16, 64)},
        {"cache__page_size": 1, "cache__num_pages": 200},
        {"cache__prefix_caching": False},
        {"cache__num_pages": 11, "cache__prefix_caching": False},
        {"cache__num_pages": 11},
    ],
    ids=lambda options: ",".join(f"{k.split('__')[1]}={v}" for k, v in options.items()),
)
def test_greedy_does_not_depend_on(options):
    engine = make_engine(**options)
    for _ in range(2):  # the second time the prefix cache has them
        assert tokens(run(engine, PROMPTS, params())) == [greedy(p, 12) for p in PROMPTS]
    assert_clean(engine)


def test_short_hash_is_still_right():
    engine = make_engine(hash_bits=4)
    for _ in range(2):
        assert tokens(run(engine, PROMPTS, params())) == [greedy(p, 12) for p in PROMPTS]


def test_preemption_gives_the_same_tokens_and_is_bounded():
    """A03: six prompts that each grow to 0.4 of the pool. A05: two that each grow to 0.7 of it."""
    engine = make_engine(cache__num_pages=11)  # 80 tokens
    prompts = random_prompts(6, 17, 18, seed=5)
    outputs = run(engine, prompts, params(max_tokens=15))
    assert tokens(outputs) == [greedy(p, 15) for p in prompts]
    long = random_prompts(2, 9, 10, seed=7)
    before = engine.counters.preemptions
    outputs = run(engine, long, params(max_tokens=47))
    assert tokens(outputs) == [greedy(p, 47) for p in long]
    assert 1 <= engine.counters.preemptions - before <= 3
    assert_clean(engine)


def test_preemption_keeps_seeded_samples_and_penalties():
    prompts = random_prompts(6, 17, 18, seed=5)
    sampling = [
        params(max_tokens=25, temperature=1.0, seed=i, presence_penalty=1.0, repetition_penalty=1.3) for i in range(6)
    ]
    small, big = make_engine(cache__num_pages=11), make_engine()
    assert tokens(run(small, prompts, sampling)) == tokens(run(big, prompts, sampling))
    assert small.counters.preemptions > 0
    assert big.counters.preemptions == 0


def test_full_hit_never_covers_the_last_token(engine):
    """A01"""
    prompt = random_prompts(1, 16, 17, seed=20)[0]
    cold = run(engine, [prompt], params(max_tokens=8))
    warm = run(engine, [prompt], params(max_tokens=8))
    both = run(engine, [prompt, prompt], params(max_tokens=8))
    expected = greedy(prompt, 8)
    assert tokens([*cold, *warm, *both]) == [expected] * 4
    assert cold[0].num_cached_tokens == 0
    assert [out.num_cached_tokens for out in (*warm, *both)] == [15] * 3
    assert_clean(engine)


@pytest.mark.parametrize("together", [False, True])
def test_partial_hits(engine, together):
    """A02: one prefix of three pages, many questions."""
    prefix = random_prompts(1, 24, 25, seed=21 + together)[0]
    questions = [prefix + q for q in random_prompts(6, 1, 14, seed=22)]
    if together:
        outputs = run(engine, questions, params())
    else:
        outputs = [run(engine, [q], params())[0] for q in questions]
    assert tokens(outputs) == [greedy(q, 12) for q in questions]
    assert outputs[0].num_cached_tokens == 0
    for i, out in enumerate(outputs[1:], start=1):
        # Past the prefix, as far as an earlier question agrees.
        assert 24 <= out.num_cached_tokens < len(questions[i])


def test_a_hundred_requests_hold_their_prefix_once():
    """2,000 tokens of system prompt, 100 requests at once: 125 pages and one for each request. Then only tails are computed."""
    engine = make_engine(
        cache__page_size=16,
        cache__num_pages=1 + 125 + 100 + 4,
        scheduler__max_num_seqs=100,
        scheduler__max_num_batched_tokens=128,
        runner__lane_buckets=(104,),
        runner__token_buckets=(128,),
        runner__check_every=16,
    )
    prefix = random_prompts(1, 2000, 2001, seed=23)[0]
    prompts = [prefix + q for q in random_prompts(100, 6, 7, seed=24)]
    most_pages = most_rows = 0
    for i, prompt in enumerate(prompts):
        engine.add_request(Request(str(i), prompt, params(max_tokens=8)))
    while engine.has_unfinished():
        engine.step()
        stats = engine.stats()
        most_pages = max(most_pages, stats.pages_active + stats.pages_shared)
        most_rows = max(most_rows, stats.num_running)
    assert most_rows == 100
    assert 200 < most_pages <= 225
    assert engine.counters.preemptions == 0
    assert engine.counters.prefix_hits == 99 * 2000
    again = run(engine, prompts, params(max_tokens=8))
    # Of the tails a few are known too: as many as a list of continuations holds.
    assert all(2000 <= out.num_cached_tokens <= 2005 for out in again)
    assert 4 <= sum(out.num_cached_tokens > 2000 for out in again) < 50
    assert_clean(engine)


def test_multi_turn_hits_generated_text(engine):
    prompt = random_prompts(1, 20, 21, seed=25)[0]
    answer = run(engine, [prompt], params(max_tokens=20))[0].outputs[0].token_ids
    turn = (*prompt, *answer, 9, 10, 11)
    out = run(engine, [turn], params())
    assert out[0].num_cached_tokens == 39  # all that was computed: the last token of the answer was not
    assert tokens(out) == [greedy(turn, 12)]


def test_salts_isolate(engine):
    """A26"""
    prompt = random_prompts(1, 30, 31, seed=26)[0]
    first = run(engine, [prompt], params(), cache_salt="a")
    again = run(engine, [prompt], params(), cache_salt="a")
    other = run(engine, [prompt], params(), cache_salt="b")
    none = run(engine, [prompt], params())
    assert [o[0].num_cached_tokens for o in (first, again, other, none)] == [0, 29, 0, 0]
    assert len({tuple(o[0].outputs[0].token_ids) for o in (first, again, other, none)}) == 1
    swapped = (*prompt[8:16], *prompt[8:])  # the same second page under another first one
    assert run(engine, [swapped], params(max_tokens=1))[0].num_cached_tokens == 0


def test_eos_and_stop_ids_end_and_min_tokens_hold_them_back(engine):
    """A20"""
    prompt = PROMPTS[3]
    free = greedy(prompt, 12)
    first = free.index(free[4])
    out = run(engine, [prompt], params(stop_token_ids=[free[4]]))[0].outputs[0]
    assert out.token_ids == free[: first + 1]
    assert (out.finish_reason, out.stop_reason) == (FinishReason.STOP, free[4])
    biased = params(logit_bias={EOS: 50.0, 8: 50.0}, min_tokens=6, stop_token_ids=[8], ignore_eos=False)
    held = run(engine, [prompt], biased)[0].outputs[0]
    assert len(held.token_ids) == 7
    assert held.token_ids[:6] != [EOS] * 6
    assert not {EOS, 8} & set(held.token_ids[:6])
    assert held.finish_reason is FinishReason.STOP
    ignored = params(logit_bias={EOS: 50.0}, min_tokens=6, max_tokens=10, ignore_eos=True)
    assert len(run(engine, [prompt], ignored)[0].outputs[0].token_ids) == 10


def test_a_seeded_answer_does_not_depend_on_its_neighbours(engine):
    """A09"""
    prompt, neighbour = PROMPTS[2], PROMPTS[5]
    seeded = params(temperature=1.0, seed=2**40 + 1)
    alone = tokens(run(engine, [prompt], seeded))[0]
    for other in (params(temperature=1.0), params(temperature=1.0, seed=3), params()):
        assert tokens(run(engine, [neighbour, prompt], [other, seeded]))[1] == alone
    assert tokens(run(engine, [prompt], params(temperature=1.0, seed=1)))[0] != alone


def test_n_continuations(engine):
    """A07: they differ, they repeat with the seed, one may end early."""
    sampling = params(n=3, temperature=1.0, seed=1, max_tokens=20)
    one, two = (run(engine, [PROMPTS[4]], sampling)[0] for _ in range(2))
    texts = [out.token_ids for out in one.outputs]
    assert [out.index for out in one.outputs] == [0, 1, 2]
    assert [out.token_ids for out in two.outputs] == texts
    assert len({tuple(t) for t in texts}) == 3
    stop = next(t for t in texts[1] if t not in texts[0] and t not in texts[2])
    early = run(engine, [PROMPTS[4]], params(n=3, temperature=1.0, seed=1, max_tokens=20, stop_token_ids=[stop]))[0]
    cut = texts[1][: texts[1].index(stop) + 1]
    assert [out.token_ids for out in early.outputs] == [texts[0], cut, texts[2]]
    assert early.num_generated_tokens == 40 + len(cut)


def test_logprobs_of_tokens_and_prompt(engine):
    """A14: one entry a prompt token, the first None, the same with a warm cache."""
    prompt = random_prompts(1, 45, 46, seed=30)[0]
    sampling = params(max_tokens=5, logprobs=3, prompt_logprobs=1)
    cold, warm = (run(engine, [prompt], sampling)[0] for _ in range(2))
    ids = list(prompt) + cold.outputs[0].token_ids
    logits = llama_oracle.forward(SPEC, tensors(), ids)
    logp = (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )
    assert cold.prompt_logprobs[0] is None
    assert len(cold.prompt_logprobs) == len(prompt)
    for t in range(1, len(prompt)):
        entry = cold.prompt_logprobs[t]
        np.testing.assert_allclose(entry.chosen.logprob, logp[t - 1, prompt[t]], atol=1e-4)
        assert entry.chosen.rank == 1 + (logp[t - 1] > logp[t - 1, prompt[t]]).sum()
        assert len(entry.top) == 1
    for i, entry in enumerate(cold.outputs[0].logprobs):
        row = logp[len(prompt) - 1 + i]
        assert [c.token_id for c in entry.top] == np.argsort(-row)[:3].tolist()
        np.testing.assert_allclose([c.logprob for c in entry.top], np.sort(row)[::-1][:3], atol=1e-4)
    for a, b in zip(cold.prompt_logprobs[1:], warm.prompt_logprobs[1:], strict=True):
        np.testing.assert_allclose(a.chosen.logprob, b.chosen.logprob, atol=1e-5)


def test_length_limits(engine):
    """A04, A21: M - 1 tokens leave room for one; M tokens, or what the pool cannot hold, are refused at once."""
    M = engine.max_model_len
    assert min(SPEC.max_position_embeddings, 64 * 8) == M
    prompt = random_prompts(1, M, M + 1, seed=31)[0]
    out = run(engine, [prompt[:-1]], params(max_tokens=10))[0].outputs[0]
    assert (len(out.token_ids), out.finish_reason) == (1, FinishReason.LENGTH)
    for length in (M, M + 1):
        with pytest.raises(InvalidRequestError, match=f"at most {M - 1} fit"):
            engine.add_request(Request("long", (prompt * 2)[:length], params()))
    small = make_engine(cache__num_pages=11)
    assert small.max_model_len == 80
    out = run(small, [prompt[:79], prompt[:5]], params(max_tokens=10))
    assert [len(t) for t in tokens(out)] == [1, 10]
    with pytest.raises(InvalidRequestError, match="at most 79 fit"):
        small.add_request(Request("long", prompt[:80], params()))


@pytest.mark.parametrize(
    ("prompt", "sampling", "field"),
    [
        ((), params(), "prompt"),
        ((SPEC.vocab_size,), params(), "prompt"),
        ((-1,), params(), "prompt"),
        ((1, True), params(), "prompt"),
        ((1,), params(logit_bias={SPEC.vocab_size: 1.0}), "logit_bias"),
        ((1,), params(stop_token_ids=[SPEC.vocab_size]), "stop_token_ids"),
        ((1,), SamplingParams(), "detokenize"),
    ],
)
def test_bad_requests_are_refused_and_neighbours_served(engine, prompt, sampling, field):
    """A15, A16"""
    engine.add_request(Request("good", PROMPTS[0], params()))
    with pytest.raises(InvalidRequestError) as error:
        engine.add_request(Request("bad", prompt, sampling))
    assert error.value.field == field
    generated = []
    while engine.has_unfinished():
        generated += [t for out in engine.step() for t in out.outputs[0].token_ids]
    assert generated == greedy(PROMPTS[0], 12)


def test_the_queue_is_bounded():
    engine = make_engine(scheduler__max_waiting=2)
    for i in range(2):
        engine.add_request(Request(str(i), (9,), params()))
    with pytest.raises(QueueFullError):
        engine.add_request(Request("2", (9,), params()))
    engine.abort("1")
    engine.add_request(Request("2", (9,), params()))


def test_random_aborts_leave_no_page_behind(engine):
    """Aborts of waiting, prefilling and decoding requests, at any time."""
    rng = np.random.default_rng(40)
    alive: list[str] = []
    for i in range(60):
        prompt = random_prompts(1, 1, 80, seed=100 + i)[0]
        engine.add_request(Request(f"r{i}", prompt, params(max_tokens=int(rng.integers(1, 40)))))
        alive.append(f"r{i}")
        if rng.random() < 0.6:
            engine.step()
        if rng.random() < 0.7:
            engine.abort(alive.pop(int(rng.integers(len(alive)))))
    while engine.has_unfinished():
        engine.step()
    assert_clean(engine)


def test_no_compilation_after_warm_up():
    engine = make_engine(runner__warm_up=True, runner__check_every=0)
    sampling = [
        params(),
        params(temperature=0.8, seed=1),
        params(temperature=1.0, top_p=0.9, top_k=20, min_p=0.1),
        params(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2, logit_bias={9: 2.0}, min_tokens=3),
        params(logprobs=5, prompt_logprobs=2),
        params(n=2, temperature=1.0),
    ]
    run(engine, PROMPTS[:6], sampling)
    run(engine, PROMPTS[:1], params())
    engine.add_request(Request("gone", PROMPTS[0], params()))
    engine.step()
    engine.abort("gone")
    assert engine.stats().compilations_after_warm_up == 0
