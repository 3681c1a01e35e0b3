"""Beam search on the tiny model against a search that shares nothing, and against transformers on the default model."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import Request, SamplingParams
from pagedjax.config import Config
from pagedjax.engine import from_loaded
from pagedjax.errors import InvalidRequestError
from pagedjax.options import with_overrides
from pagedjax.types import FinishReason
from pagedjax.weights import load_model
from tests.engine.tiny import EOS, SPEC, assert_clean, greedy, make_engine, params, random_prompts, run, tensors
from tests.oracles import beam_oracle, goldens, llama_oracle

NEAR_TIE = 1e-3
PROMPTS = random_prompts(3, 5, 30, seed=33)


@pytest.fixture(scope="module")
def engine():
    return make_engine()


@functools.cache
def _logprobs(ids: tuple[int, ...]) -> np.ndarray:
    logits = llama_oracle.forward(SPEC, tensors(), list(ids))[-1]
    return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


def oracle(prompt, width, *, max_new=10, ignore_eos=False, **settings):
    end_ids = set() if ignore_eos else {EOS}
    return beam_oracle.search(lambda ids: _logprobs(tuple(ids)), prompt, width, end_ids, max_new, **settings)


def beams(width: int, **fields) -> SamplingParams:
    return params(**{"beam_width": width, "n": width, "max_tokens": 10, "ignore_eos": False, **fields})


def assert_same_hypotheses(outputs, expected, length_penalty: float = 1.0) -> None:
    """Token for token; two hypotheses whose scores are a near tie may change places.

    A near tie is one of summed log-probabilities; a negative length penalty multiplies sums, and so the tolerance.
    """
    ours = [tuple(out.token_ids) for out in outputs]
    scale = [len(ids) ** -length_penalty for ids in ours]
    scores = [out.cumulative_logprob * factor for out, factor in zip(outputs, scale, strict=True)]
    tolerance = NEAR_TIE * max(1.0, *scale)
    np.testing.assert_allclose(scores, [score for _, score in expected], atol=tolerance, rtol=0)
    by_ids = dict(expected)
    for ids, score in zip(ours, scores, strict=True):
        # Only the last place can go to somebody else.
        assert abs(score - by_ids.get(ids, expected[-1][1])) < tolerance, (ids, expected)
    assert len(set(ours)) == len(ours)


@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_equals_a_search_that_shares_nothing(engine, width):
    for prompt, out in zip(PROMPTS, run(engine, PROMPTS, beams(width)), strict=True):
        assert_same_hypotheses(out.outputs, oracle(prompt, width))
    assert_clean(engine)


@pytest.mark.parametrize(
    ("length_penalty", "early_stopping"), [(1.0, True), (2.0, "never"), (-1.0, False), (0.0, "never")]
)
def test_length_penalty_and_early_stopping(engine, length_penalty, early_stopping):
    settings = dict(length_penalty=length_penalty, early_stopping=early_stopping)
    for prompt, out in zip(PROMPTS, run(engine, PROMPTS, beams(3, **settings)), strict=True):
        assert_same_hypotheses(out.outputs, oracle(prompt, 3, **settings), length_penalty)


@pytest.mark.smoke
def test_one_beam_is_greedy(engine):
    out = run(engine, PROMPTS[:1], beams(1, ignore_eos=True))[0]
    assert out.outputs[0].token_ids == greedy(PROMPTS[0], 10)


def test_beams_beside_other_requests(engine):
    many = [beams(3), params(), beams(2, n=1), params(temperature=0.8, seed=1, n=2)]
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[2], PROMPTS[1]]
    alone = [run(engine, [p], s)[0] for p, s in zip(prompts, many, strict=True)]
    together = run(engine, prompts, many)
    ids = lambda outputs: [[o.token_ids for o in out.outputs] for out in outputs]  # noqa: E731
    assert ids(together) == ids(alone)
    assert len(together[2].outputs) == 1
    assert_clean(engine)


def test_beams_share_pages():
    """The paper's Fig. 9: beams hold their common past once, and a reordering moves no page."""
    engine = make_engine()
    prompt = random_prompts(1, 41, 42, seed=3)[0]  # five full pages and a token
    engine.add_request(Request("r", prompt, beams(4, ignore_eos=True, max_tokens=20)))
    most = 0
    while engine.has_unfinished():
        engine.step()
        stats = engine.stats()
        most = max(most, stats.pages_active + stats.pages_shared)
    alone = -(-(41 + 20) // 8)
    assert most < 4 * alone - 3 * 5 + 1  # the prompt's full pages once
    assert_clean(engine)


@pytest.mark.parametrize("options", [{"cache__num_pages": 29}, {"scheduler__max_num_seqs": 4}])
def test_little_room_changes_nothing(engine, options):
    """Two searches that cannot both run: rows or pages of one are taken back, as a whole, and it comes again."""
    small = make_engine(scheduler__growth_share=0.0, **options)
    sampling = beams(4, ignore_eos=True, max_tokens=14)
    prompts = random_prompts(3, 12, 20, seed=8)
    ids = lambda outputs: [[o.token_ids for o in out.outputs] for out in outputs]  # noqa: E731
    assert ids(run(small, prompts, sampling)) == ids(run(engine, prompts, sampling))
    assert_clean(small)


def test_ends_by_length_and_by_id(engine):
    out = run(engine, PROMPTS[:1], beams(4, max_tokens=3))[0]
    assert all(len(o.token_ids) <= 3 for o in out.outputs)
    for o in out.outputs:
        assert o.finish_reason is (FinishReason.STOP if o.token_ids[-1] == EOS else FinishReason.LENGTH)
    assert out.num_generated_tokens == sum(len(o.token_ids) for o in out.outputs)


def test_abort_in_mid_search(engine):
    engine.add_request(Request("r", PROMPTS[0], beams(4, max_tokens=30)))
    for _ in range(4):
        engine.step()
    engine.abort("r")
    assert_clean(engine)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"n": 3}, "n"),
        ({"beam_width": 11}, "beam_width"),
        ({"logprobs": 1}, "logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"stop_token_ids": (3,)}, "stop_token_ids"),
        ({"early_stopping": "sometimes"}, "early_stopping"),
        ({"early_stopping": 1}, "early_stopping"),
        ({"length_penalty": float("nan")}, "length_penalty"),
    ],
)
def test_what_does_not_go_together_is_refused(fields, field):
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(**{"beam_width": 2, "n": 2, **fields})
    assert error.value.field == field


def test_a_search_that_could_never_run_is_refused():
    engine = make_engine(cache__num_pages=11, scheduler__max_num_seqs=4)
    for fields, field in (({"width": 5}, "beam_width"), ({"width": 4, "max_tokens": 30}, "max_tokens")):
        with pytest.raises(InvalidRequestError) as error:
            engine.add_request(Request("r", PROMPTS[0], beams(**fields)))
        assert error.value.field == field
    assert not engine.has_unfinished()


@pytest.mark.model
def test_equals_transformers():
    """20 prompts by 2, 4 and 6 beams, and other ends and length penalties, all in one engine at once."""
    options = {
        "model.dtype": "float32",
        "model.max_model_len": 512,
        "cache.num_pages": 1200,
        "scheduler.max_num_seqs": 64,
        "runner.lane_buckets": (64,),
        "runner.token_buckets": (512,),
        "runner.warm_up": False,
    }
    engine = from_loaded(load_model("default", jnp.float32), with_overrides(Config(), options), progress=False)
    cases = goldens.beams()
    assert len(cases) >= 60
    sampling = [
        SamplingParams(
            n=case["width"],
            beam_width=case["width"],
            max_tokens=case["max_new"],
            length_penalty=case["length_penalty"],
            early_stopping=case["early_stopping"],
            detokenize=False,
        )
        for case in cases
    ]
    outputs = run(engine, [tuple(case["ids"]) for case in cases], sampling)
    excused = 0
    for case, out in zip(cases, outputs, strict=True):
        expected = [(tuple(h["tokens"]), h["score"]) for h in case["hypotheses"]]
        assert_same_hypotheses(out.outputs, expected, case["length_penalty"])
        excused += [tuple(o.token_ids) for o in out.outputs] != [ids for ids, _ in expected]
    assert excused <= 3, f"{excused} near ties"
    assert_clean(engine)
