"""Reservation in one piece and growth by chunks: the same answers as with pages, other pages at other times."""

from __future__ import annotations

import itertools

import pytest

from pagedjax import Request
from pagedjax.engine import load_engine, restore_engine
from pagedjax.errors import ConfigError, InvalidRequestError, SnapshotError
from tests.engine.tiny import assert_clean, greedy, loaded, make_engine, params, random_prompts, run, tokens

OFF = {"cache__num_pages": 17, "cache__prefix_caching": False, "scheduler__growth_share": 0.0}
MODES = {
    "max_len": {**OFF, "cache__allocation": "contiguous"},
    "pow2": {**OFF, "cache__allocation": "contiguous", "cache__reserve": "pow2"},
    "request": {**OFF, "cache__allocation": "contiguous", "cache__reserve": "request"},
    "chunked": {**OFF, "cache__allocation": "chunked", "cache__chunk_tokens": 24},
}
PROMPTS = random_prompts(7, 3, 50, seed=23)
LENGTHS = [30, 5, 17, 40, 1, 33, 24]
SAMPLING = [
    params(max_tokens=n) if i % 2 else params(max_tokens=n, temperature=1.0, seed=i) for i, n in enumerate(LENGTHS)
]


@pytest.fixture(scope="module")
def paged() -> list[list[int]]:
    """What pages answer; the greedy ones are checked against the oracle."""
    answers = tokens(run(make_engine(**OFF), PROMPTS, SAMPLING))
    for i in range(1, len(PROMPTS), 2):
        assert answers[i] == greedy(PROMPTS[i], LENGTHS[i])
    return answers


def serve(engine):
    """Run PROMPTS; (answers, what `stats` said after each step, most rows at once)."""
    for i, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLING, strict=True)):
        engine.add_request(Request(str(i), prompt, sampling))
    ids, seen = [[] for _ in PROMPTS], []
    for _ in range(2000):
        if not engine.has_unfinished():
            return ids, seen
        for out in engine.step():
            for part in out.outputs:
                ids[int(out.request_id)] += part.token_ids
        seen.append(engine.stats())
    raise AssertionError("the engine does not come to an end")


@pytest.mark.parametrize("mode", MODES)
def test_the_same_tokens_as_with_pages(mode, paged):
    """Invariants, and that rows lie in whole pieces, are checked after every step."""
    engine = make_engine(**MODES[mode])
    answers, seen = serve(engine)
    assert answers == paged
    assert_clean(engine)
    assert engine.stats().pages_cached == engine.counters.prefix_hits == 0
    assert max(stats.num_waiting for stats in seen) > 0
    # The whole pool is one request at its longest. Less is reserved where more is known of the requests.
    assert (max(stats.num_running for stats in seen) == 1) == (mode == "max_len")
    # Whoever reserved everything is never in the way of others; whoever grows may be.
    assert (engine.counters.preemptions > 0) == (mode == "chunked")


@pytest.mark.parametrize(("mode", "slots"), [("max_len", 128), ("pow2", 56), ("request", 48), ("chunked", 24)])
def test_what_is_held_but_not_used_is_seen(mode, slots):
    """A prompt of 20 tokens and up to 25 more: 44 slots are enough for keys and values."""
    engine = make_engine(**MODES[mode], runner__overlap=False, runner__max_steps=1)
    prompt = random_prompts(1, 20, 21, seed=5)[0]
    engine.add_request(Request("0", prompt, params(max_tokens=25)))
    engine.step()
    stats = engine.stats()
    assert stats.pages_active * 8 == slots
    fillable = min(slots, 44)
    assert stats.owned_shares["tokens"] == pytest.approx(20 / slots)
    assert stats.owned_shares["reserved"] == pytest.approx((fillable - 20) / slots)
    assert stats.owned_shares["internal"] == pytest.approx((slots - fillable) / slots)


def test_samples_and_branches_share_nothing_and_are_the_same():
    """Continuations and forks compute their prompt themselves."""
    sampling = params(n=3, temperature=1.0, seed=9, max_tokens=30)
    answers = []
    for options in (OFF, MODES["chunked"], MODES["request"]):
        engine = make_engine(**options)
        engine.add_request(Request("0", PROMPTS[0], sampling))
        ids: dict[tuple[str, int], list[int]] = {}
        for turn in itertools.count():
            if not engine.has_unfinished():
                break
            if turn == 2:
                branch = engine.fork("0", "1", params(max_tokens=6))
            for out in engine.step():
                for part in out.outputs:
                    ids.setdefault((out.request_id, part.index), []).extend(part.token_ids)
            assert options is OFF or engine.stats().sharing_ratio == 0
        assert ids.pop(("1", 0)) == greedy(branch.prompt_ids, 6)
        answers.append(ids)
        assert engine.counters.forks == (3 if options is OFF else 0)
        assert_clean(engine)
    assert answers[0] == answers[1] == answers[2]


def test_beams_and_compaction_are_refused():
    engine = make_engine(**MODES["chunked"])
    with pytest.raises(InvalidRequestError, match=r"beam_width.*allocation=paged"):
        engine.add_request(Request("0", PROMPTS[0], params(beam_width=2, n=2)))
    with pytest.raises(ConfigError, match=r"config.cache.allocation: compact needs paged, got chunked"):
        engine.compact()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cache__allocation": "contiguous"}, "config.cache.prefix_caching=false"),
        ({**OFF, "cache__allocation": "chunked", "cache__host_pages": 4}, "config.cache.host_pages must be 0, got 4"),
        ({**MODES["chunked"], "cache__chunk_tokens": 20}, "multiple of config.cache.page_size = 8, got 20"),
        ({**MODES["chunked"], "cache__chunk_tokens": 520}, "at most 128, the 16 pages of the pool, got 520"),
    ],
)
def test_options_that_do_not_go_together(options, words):
    with pytest.raises(ConfigError, match=words):
        make_engine(**options)


def test_a_snapshot_goes_on_as_it_was(paged, tmp_path):
    engine = make_engine(**MODES["chunked"])
    for i, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLING, strict=True)):
        engine.add_request(Request(str(i), prompt, sampling))
    ids = [[] for _ in PROMPTS]
    for turn in itertools.count():
        if not engine.has_unfinished():
            break
        if turn == 4:
            engine.save(tmp_path / "state")
            programs = engine.runner.programs
            engine = restore_engine(tmp_path / "state", loaded(), progress=False)
            engine.runner.programs = programs
        for out in engine.step():
            for part in out.outputs:
                ids[int(out.request_id)] += part.token_ids
    assert ids == paged
    assert_clean(engine)
    with pytest.raises(SnapshotError, match=r"allocation is .*chunk_pages.* None in this engine"):
        load_engine(make_engine(**OFF, model__max_model_len=120), tmp_path / "state")
