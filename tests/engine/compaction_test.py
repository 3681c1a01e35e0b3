"""Compaction between steps changes no output."""

from __future__ import annotations

from pagedjax import Request
from tests.engine.tiny import assert_clean, make_engine, params, random_prompts, run, tokens

PROMPTS = random_prompts(6, 3, 30, seed=41)


def served(engine, sampling, every: int) -> dict[str, list[int]]:
    """Tokens by request, compacting every so many steps; some requests come later than others."""
    waiting = [Request(str(i), p, sampling) for i, p in enumerate(PROMPTS)]
    ids: dict[str, list[int]] = {}
    turn = 0
    while waiting or engine.has_unfinished():
        if waiting and turn % 2 == 0:
            engine.add_request(waiting.pop(0))
        for out in engine.step():
            for o in out.outputs:
                ids.setdefault(f"{out.request_id}/{o.index}", []).extend(o.token_ids)
        turn += 1
        if every and turn % every == 0:
            before, after = engine.compact()
            assert after >= before
    return ids


def test_it_is_invisible():
    plain, compacted = make_engine(runner__max_steps=3), make_engine(runner__max_steps=3)
    for sampling in (params(max_tokens=20), params(temperature=1.0, seed=2, n=2, max_tokens=14)):
        assert served(compacted, sampling, 2) == served(plain, sampling, 0)
        assert_clean(compacted)
    # What was cached is still found, under its new numbers.
    again = run(compacted, PROMPTS, params(max_tokens=2))
    assert all(out.num_cached_tokens == len(p) - 1 for out, p in zip(again, PROMPTS, strict=True))
    assert tokens(again) == tokens(run(plain, PROMPTS, params(max_tokens=2)))
