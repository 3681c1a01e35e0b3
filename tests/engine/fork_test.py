"""Rows that begin as copies of others: continuations of one request, and branches off a running one."""

from __future__ import annotations

import pytest

from pagedjax import Request, SamplingParams
from pagedjax.errors import InvalidRequestError
from tests.engine.tiny import EOS, assert_clean, greedy, make_engine, params, random_prompts, run, tokens

PAGE = 8


@pytest.fixture(scope="module")
def engine():
    return make_engine()


def sampled(**fields) -> SamplingParams:
    return params(temperature=0.9, seed=5, **fields)


def continuations(engine, prompt, sampling):
    return [out.token_ids for out in run(engine, [prompt], sampling)[0].outputs]


@pytest.mark.parametrize("length", [1, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 3])
def test_each_continuation_is_what_it_would_be_alone(engine, length):
    """The noise of a continuation belongs to its number, so computing it alone is the oracle."""
    prompt = random_prompts(1, length, length + 1, seed=length)[0]
    together = continuations(engine, prompt, sampled(n=4))
    lone = make_engine(
        cache__prefix_caching=False, scheduler__max_num_seqs=1
    )  # no room for a fork: one after the other
    assert continuations(lone, prompt, sampled(n=4)) == together
    assert len({tuple(ids) for ids in together}) == 4
    assert lone.counters.forks == 0
    assert_clean(engine)


@pytest.mark.parametrize(("length", "copies"), [(2 * PAGE + 3, 3), (2 * PAGE, 0)])
def test_continuations_share_the_prompt_and_copy_only_its_last_page(length, copies):
    """The paper's Fig. 8: of n holders that write into a page, n - 1 get a copy, the last one keeps it. A full page is
    never copied."""
    engine = make_engine()
    engine.add_request(Request("r", random_prompts(1, length, length + 1, seed=3)[0], sampled(n=4, max_tokens=12)))
    engine.step()  # the prompt, and the first token of all four
    stats = engine.stats()
    assert (engine.counters.forks, stats.num_running) == (3, 4)
    prompt_pages = -(-length // PAGE)
    assert (stats.pages_shared, stats.pages_active) == (prompt_pages, 0)
    while engine.has_unfinished():
        engine.step()
    assert engine.stats().page_copies == copies
    assert_clean(engine)


@pytest.mark.smoke
def test_greedy_continuations_are_equal(engine):
    prompt = random_prompts(1, 21, 22, seed=9)[0]
    assert continuations(engine, prompt, params(n=3)) == [greedy(prompt, 12)] * 3


def test_no_room_for_all_of_them():
    """More continuations than rows, and a pool that holds few of them at once: the same tokens."""
    prompt = random_prompts(1, 19, 20, seed=2)[0]
    expected = continuations(make_engine(), prompt, sampled(n=6, max_tokens=20))
    for options in ({"scheduler__max_num_seqs": 2}, {"cache__num_pages": 11}, {"cache__num_pages": 7}):
        engine = make_engine(**options)
        assert continuations(engine, prompt, sampled(n=6, max_tokens=20)) == expected
        assert_clean(engine)


def test_a_continuation_may_end_at_its_first_token(engine):
    prompt = random_prompts(1, 11, 12, seed=4)[0]
    out = run(engine, [prompt], sampled(n=5, max_tokens=1))[0]
    assert [len(o.token_ids) for o in out.outputs] == [1] * 5
    assert out.finished
    assert_clean(engine)


def test_penalties_count_each_branch_by_itself(engine):
    prompt = random_prompts(1, 13, 14, seed=6)[0]
    sampling = sampled(n=3, presence_penalty=1.5, repetition_penalty=1.3, max_tokens=16)
    together = continuations(engine, prompt, sampling)
    lone = make_engine(cache__prefix_caching=False, scheduler__max_num_seqs=1)
    assert continuations(lone, prompt, sampling) == together


def start(engine, prompt, sampling, num_tokens: int, request_id: str = "r") -> list[int]:
    """Run until the request has generated at least num_tokens; returns them."""
    engine.add_request(Request(request_id, prompt, sampling))
    ids: list[int] = []
    while len(ids) < num_tokens:
        for out in engine.step():
            ids += out.outputs[0].token_ids
    return ids


def finish(engine) -> dict[str, list[int]]:
    ids: dict[str, list[int]] = {}
    while engine.has_unfinished():
        for out in engine.step():
            ids.setdefault(out.request_id, []).extend(out.outputs[0].token_ids)
    return ids


def test_a_branch_goes_on_as_a_request_with_all_that_was_known(engine):
    prompt = random_prompts(1, 10, 11, seed=14)[0]
    before = engine.stats().page_copies
    known = start(engine, prompt, params(max_tokens=40), 9)
    everything = engine.fork("r", "greedy").prompt_ids
    assert engine.fork("r", "sampled", sampled(max_tokens=10)).prompt_ids == everything
    assert engine.stats().num_running == 3
    rest = finish(engine)
    assert known + rest["r"] == greedy(prompt, 40)
    assert everything[: len(prompt) + len(known)] == (*prompt, *known)
    assert rest["greedy"] == greedy(everything, 40)
    assert rest["sampled"] == tokens(run(engine, [everything], sampled(max_tokens=10)))[0]
    assert engine.stats().page_copies - before == (2 if (len(everything) - 1) % PAGE else 0)
    assert_clean(engine)


def test_branches_of_what_waits_ends_or_does_not_exist():
    engine = make_engine(scheduler__max_num_seqs=1)
    prompts = random_prompts(2, 9, 10, seed=1)
    start(engine, prompts[0], params(max_tokens=30), 3)
    engine.add_request(Request("waiting", prompts[1], params(max_tokens=4)))
    engine.fork("waiting", "a")
    # No row: it waits, and comes back through the prefix cache.
    known = engine.fork("r", "b", params(max_tokens=4)).prompt_ids
    for arguments, field in ((("nobody", "c"), "request_id"), (("r", "b"), "request_id")):
        with pytest.raises(InvalidRequestError) as error:
            engine.fork(*arguments)
        assert error.value.field == field
    with pytest.raises(InvalidRequestError, match="index"):
        engine.fork("r", "c", index=1)
    rest = finish(engine)
    assert rest["a"] == rest["waiting"] == greedy(prompts[1], 4)
    assert rest["b"] == greedy(known, 4)
    assert_clean(engine)


def test_aborting_one_side_leaves_the_other(engine):
    prompt = random_prompts(1, 18, 19, seed=12)[0]
    start(engine, prompt, params(max_tokens=30), 4)
    known = engine.fork("r", "branch").prompt_ids
    engine.abort("r")
    assert finish(engine)["branch"] == greedy(known, 30)
    assert_clean(engine)


def test_continuations_with_end_ids_and_preemption():
    """A07: one choice ends early while the others go on; the same call gives the same again, preempted or not."""
    prompt = random_prompts(1, 17, 18, seed=21)[0]
    sampling = SamplingParams(
        n=4, temperature=1.2, seed=3, max_tokens=24, detokenize=False, stop_token_ids=(9, 12, EOS)
    )
    first = continuations(make_engine(), prompt, sampling)
    small = make_engine(cache__num_pages=11, scheduler__growth_share=0.0)
    assert continuations(small, prompt, sampling) == continuations(small, prompt, sampling) == first
    assert_clean(small)
