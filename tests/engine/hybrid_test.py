"""Models with windows in the engine: three layers of four see 12 tokens, pages are of 4. Against the numpy oracle.

Pages behind the windows are given back while sequences run; that, preemption, forks and the prefix cache must not show.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import Request
from pagedjax.engine import Engine, diff_states, restore_engine
from pagedjax.errors import ConfigError, InvalidRequestError
from pagedjax.models import Gemma3, Llama
from pagedjax.weights import LoadedModel
from tests.engine.tiny import EOS, assert_clean, params, random_prompts, run, share_programs, tokens
from tests.engine.tiny import make_engine as make_tiny_engine
from tests.models.gemma_test import gemma_spec
from tests.models.harness import random_checkpoint, tiny_spec
from tests.oracles import beam_oracle, gemma_oracle, llama_oracle

PAGE, WINDOW = 4, 12
HYBRID = gemma_spec(
    windows=(WINDOW, WINDOW, WINDOW, 0), head_dim=16, max_position_embeddings=512, tie_word_embeddings=False
)
ALL_WINDOWED = tiny_spec(num_layers=2, windows=(WINDOW, WINDOW), max_position_embeddings=512)
NEAR_TIE = 1e-3


@functools.cache
def tensors(spec) -> dict[str, np.ndarray]:
    return random_checkpoint(spec, seed=3)


@functools.cache
def model(spec) -> LoadedModel:
    kind = Gemma3 if spec is HYBRID else Llama
    return LoadedModel(kind.load(spec, tensors(spec), jnp.float32), spec, None, "tiny", (EOS,))


def make_engine(spec=HYBRID, *, steps: int | None = None, **overrides) -> Engine:
    """Engines of the same shapes, so that their programs are compiled once; `steps`: of one dispatch, 8 at most."""
    defaults = {"cache__page_size": PAGE, "cache__num_pages": 110, "model__max_model_len": 256}
    engine = make_tiny_engine(model=model(spec), **{**defaults, **overrides})
    if steps is not None:
        engine.runner.steps_within = lambda *_: steps
    return engine


def assert_greedy(prompt: Sequence[int], output: Sequence[int], spec=HYBRID) -> None:
    """Every token is the oracle's argmax after all before it, but for near ties."""
    forward = gemma_oracle.forward if spec is HYBRID else llama_oracle.forward
    logits = forward(spec, tensors(spec), [*prompt, *output[:-1]])[len(prompt) - 1 :]
    for step, token in enumerate(output):
        assert logits[step].max() - logits[step][token] < NEAR_TIE, f"token {step} of {list(prompt[:4])}..."


PROMPTS = random_prompts(6, 3, 60, seed=5)


@pytest.mark.parametrize("caching", [True, False])
def test_greedy_equals_the_oracle(caching):
    """Prompts and continuations on both sides of the window, all at once in chunks of 32 tokens."""
    engine = make_engine(cache__prefix_caching=caching)
    outputs = run(engine, PROMPTS, params(max_tokens=24))
    for prompt, output in zip(PROMPTS, tokens(outputs), strict=True):
        assert_greedy(prompt, output)
    assert_clean(engine)


def owned(engine: Engine) -> int:
    stats = engine.runner.page_stats()
    return engine.runner.num_usable_pages - int(stats.free) - int(stats.cached)


def test_pages_behind_the_windows_are_given_back_while_a_sequence_runs():
    """One sequence of 200 tokens: its full group has 50 pages in the end, the three others never more than the window."""
    engine = make_engine(steps=1, runner__overlap=False)
    engine.add_request(Request("long", tuple(PROMPTS[0]), params(max_tokens=200 - len(PROMPTS[0]))))
    length, most_windowed = len(PROMPTS[0]), 0
    while engine.has_unfinished():
        for out in engine.step():
            length += sum(len(c.token_ids) for c in out.outputs)
        if engine.has_unfinished():
            table = engine.runner.page_table()
            by_group = (table > 0).sum((1, 2)).tolist()
            assert owned(engine) == sum(by_group)
            if length > len(PROMPTS[0]):
                assert by_group[0] == -(-(length - 1) // PAGE)
                most_windowed = max(most_windowed, *by_group[1:])
    assert length == 200
    assert most_windowed == WINDOW // PAGE + 1
    assert_clean(engine)


def test_the_device_loop_gives_back_by_itself():
    """200 tokens would be 50 pages in each of four groups, and there are 109: no fault, no preemption, whole dispatches."""
    prompt = PROMPTS[0][:3]
    engine = make_engine(steps=8, cache__prefix_caching=False)
    (output,) = tokens(run(engine, [prompt], params(max_tokens=197)))
    assert_greedy(prompt, output)
    assert engine.counters.preemptions == 0
    assert engine.counters.dispatches == 1 + -(-196 // 8)
    assert_clean(engine)


def test_a_sequence_longer_than_the_pool():
    """Where every layer sees a window, 12 pages of 4 tokens are enough for 200 tokens."""
    engine = make_engine(ALL_WINDOWED, cache__num_pages=13)
    assert engine.max_model_len == 256
    prompt = random_prompts(1, 60, 61, seed=8)[0]
    (output,) = tokens(run(engine, [prompt], params(max_tokens=140)))
    assert_greedy(prompt, output, ALL_WINDOWED)
    assert engine.counters.preemptions == 0
    assert_clean(engine)


def test_preemption_does_not_show():
    engine = make_engine(scheduler__growth_share=0.0)
    prompts = random_prompts(8, 4, 12, seed=9)
    for prompt, output in zip(prompts, tokens(run(engine, prompts, params(max_tokens=50))), strict=True):
        assert_greedy(prompt, output)
    assert engine.counters.preemptions > 0
    assert_clean(engine)


def test_the_prefix_cache_serves_all_groups():
    """A prompt of 50 tokens, then a second turn on top of its answer: found although most of it is behind the windows."""
    engine = make_engine()
    prompt = random_prompts(1, 50, 51, seed=11)[0]
    first = run(engine, [prompt], params(max_tokens=30))[0]
    turn = (*prompt, *first.outputs[0].token_ids, *PROMPTS[1][:9])
    second, third = run(engine, [turn, prompt], params(max_tokens=20))
    assert second.num_cached_tokens == 79 // PAGE * PAGE  # the last generated token was never computed
    assert third.num_cached_tokens == 49 // PAGE * PAGE
    assert_greedy(turn, second.outputs[0].token_ids)
    assert_greedy(prompt, third.outputs[0].token_ids)
    assert third.outputs[0].token_ids == first.outputs[0].token_ids[:20]
    assert_clean(engine)


def test_a_hit_needs_the_prefix_in_every_group():
    """Others take the pages that the windowed groups gave back first: what is left of the prefix is no hit, or a right one."""
    engine = make_engine()
    prompt = random_prompts(1, 50, 51, seed=13)[0]
    run(engine, [prompt], params(max_tokens=2))
    for seed in range(14, 18):
        run(engine, random_prompts(2, 40, 60, seed=seed), params(max_tokens=4))
        again = run(engine, [prompt], params(max_tokens=8))[0]
        assert_greedy(prompt, again.outputs[0].token_ids)
    assert_clean(engine)


def poison(engine: Engine) -> None:
    """NaN into every page that holds nothing of use, NULL_PAGE among them."""
    state = engine.runner._state
    useless = (np.asarray(state.pages.ref_counts) == 0) & (np.asarray(state.pages.parent) == 0)
    pages = jnp.where(jnp.asarray(useless)[None, :, None, None, None], jnp.float32(np.nan), state.cache.kv_pages)
    engine.runner._state = state.replace(cache=state.cache._replace(kv_pages=pages))


@pytest.mark.parametrize("caching", [True, False])
def test_poisoned_free_pages_never_show(caching):
    engine = make_engine(steps=3, cache__prefix_caching=caching)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(Request(str(i), tuple(prompt), params(max_tokens=20)))
    done: dict[str, list[int]] = {str(i): [] for i in range(len(PROMPTS))}
    while engine.has_unfinished():
        poison(engine)
        for out in engine.step():
            done[out.request_id] += out.outputs[0].token_ids
    for i, prompt in enumerate(PROMPTS):
        assert_greedy(prompt, done[str(i)])
    assert_clean(engine)


@pytest.mark.parametrize("prompt_len", [2 * WINDOW, 3 * WINDOW, 3 * WINDOW + 1])
def test_forks_go_on_past_two_windows(prompt_len):
    """Three samples over one prompt: shared pages leave the windows of each in its own time, and nothing is freed twice."""
    prompt = random_prompts(1, prompt_len, prompt_len + 1, seed=21)[0]
    sampling = params(max_tokens=3 * WINDOW, n=3, temperature=0.9, seed=5)
    together = make_engine(steps=5)
    out = run(together, [prompt], sampling)[0]
    assert together.counters.forks == 2
    assert_clean(together)
    # The same samples where nothing is shared, as no two of them run at once.
    alone = make_engine(cache__prefix_caching=False)
    alone._scheduler._free_rows[:] = [0]
    want = run(alone, [prompt], sampling)[0]
    assert [c.token_ids for c in out.outputs] == [c.token_ids for c in want.outputs]
    assert len({tuple(c.token_ids) for c in out.outputs}) == 3
    assert_clean(alone)


TWO_GROUPS = tiny_spec(num_layers=2, windows=(WINDOW, 0), max_position_embeddings=512)


def test_a_pool_smaller_than_one_page_a_group_is_refused():
    with pytest.raises(ConfigError, match=r"cache.num_pages: must be at least 3 .*2 layer groups.*, got 2"):
        make_engine(TWO_GROUPS, cache__num_pages=2)


def test_a_snapshot_in_mid_flight_goes_on(tmp_path):
    """Tables of two groups, with holes where pages fell out of the window."""
    engine = make_engine(steps=3)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(Request(str(i), prompt, params(max_tokens=30, temperature=1.0, seed=i)))
    for _ in range(6):
        engine.step()
    engine.save(tmp_path / "s")
    restored = share_programs(restore_engine(tmp_path / "s", model(HYBRID), progress=False))
    assert diff_states(restored.runner.state, engine.runner.state) is None
    pages = restored.runner.state.pages
    used = np.arange(pages.max_pages_per_row) < np.asarray(pages.num_pages)[:, None]
    assert ((np.asarray(pages.table) == 0) & used).any()
    rest: list[dict[str, list[int]]] = []
    for each in (engine, restored):
        each.runner.steps_within = lambda *_: 3
        ids: dict[str, list[int]] = {}
        while each.has_unfinished():
            for out in each.step():
                ids.setdefault(out.request_id, []).extend(out.outputs[0].token_ids)
        rest.append(ids)
        assert_clean(each)
    assert rest[0] == rest[1]
    assert diff_states(restored.runner.state, engine.runner.state) is None


@functools.cache
def _logprobs(ids: tuple[int, ...]) -> np.ndarray:
    logits = llama_oracle.forward(TWO_GROUPS, tensors(TWO_GROUPS), list(ids))[-1]
    return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


def test_beams_over_windows_equal_a_search_that_shares_nothing():
    """Past the window, where pages of the two groups part; in a roomy pool and in one where searches preempt each other."""
    prompts = random_prompts(3, 9, 22, seed=8)
    sampling = params(beam_width=3, n=3, max_tokens=14)
    for num_pages in (110, 64):
        engine = make_engine(TWO_GROUPS, cache__num_pages=num_pages, scheduler__growth_share=0.0)
        outputs = run(engine, prompts, sampling)
        for prompt, out in zip(prompts, outputs, strict=True):
            expected = dict(beam_oracle.search(lambda ids: _logprobs(tuple(ids)), prompt, 3, set(), 14))
            scores = {tuple(o.token_ids): o.cumulative_logprob / 14 for o in out.outputs}
            np.testing.assert_allclose(sorted(scores.values()), sorted(expected.values()), atol=NEAR_TIE)
            assert len(scores.keys() & expected.keys()) >= 2  # the last place can be a near tie
        assert_clean(engine)


def test_beams_that_could_never_run_at_once_are_refused():
    """Every group counts: 3 beams of 40 tokens need up to 10 pages each in one group and 4 in the other."""
    engine = make_engine(TWO_GROUPS, cache__num_pages=42)
    prompt = tuple(random_prompts(1, 10, 11, seed=1)[0])
    with pytest.raises(InvalidRequestError, match=r"could need \d+ pages, there are 41; at most \d+ tokens fit"):
        engine.add_request(Request("r", prompt, params(beam_width=3, n=3, max_tokens=30)))
    assert not engine.has_unfinished()
