"""The sampler against the oracle, and the faults that others had."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.sampling import init_row_sampling, init_token_counts, is_stop, sample
from pagedjax.sampling.random import gumbel, row_keys
from pagedjax.sampling.select import Limits, select
from pagedjax.types import SamplingParams
from tests.oracles import sampling_oracle as oracle
from tests.sampling.helpers import GREEDY, R, jit_sample, run

V = 300
EOS = (7, 11)


def noise_of(seed, sample_index, position, vocab_size=V):
    keys = row_keys(
        jnp.asarray([[seed >> 32, seed & 0xFFFFFFFF]], jnp.uint32),
        jnp.asarray([sample_index], jnp.int32),
        jnp.asarray([position], jnp.int32),
    )
    return np.asarray(gumbel(keys, jnp.arange(vocab_size, dtype=jnp.int32)[None, :]))[0].astype(np.float64)


ids = st.integers(0, V - 1)
histories = st.lists(st.integers(0, 40), max_size=30)
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-40, 1e-4, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 16, 17, 100, 299, 10**6]),
    top_p=st.sampled_from([1.0, 1.0, 1e-4, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, -2.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -1.0, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.5, 1e-3]),
    logit_bias=st.none() | st.dictionaries(ids, st.sampled_from([-100.0, -1.0, 5.0, 100.0]), max_size=8),
    min_tokens=st.sampled_from([0, 0, 5, 16]),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(ids, max_size=4),
)
rows_of_requests = st.lists(
    st.tuples(samplings, histories, histories, st.integers(-(2**63), 2**64 - 1), st.integers(0, 9), st.integers(0, 99)),
    min_size=1,
    max_size=R,
)


@pytest.mark.parametrize("num_candidates", [16, 0], ids=["candidates", "exact"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(requests=rows_of_requests, logits_seed=st.integers(0, 999), flat=st.booleans(), ties=st.booleans())
def test_equals_oracle(num_candidates, requests, logits_seed, flat, ties):
    logits = np.random.default_rng(logits_seed).normal(size=(len(requests), V)) * (0.2 if flat else 4.0)
    if ties:
        logits = np.round(logits) + 0.0  # no -0
    logits = logits.astype(np.float32)
    chosen, prompts, generated, seeds, indices, positions = zip(*requests, strict=True)
    out = run(
        logits,
        chosen,
        prompts=prompts,
        generated=generated,
        eos=EOS,
        seeds=seeds,
        sample_indices=indices,
        positions=positions,
        num_candidates=num_candidates,
    )
    for i, s in enumerate(chosen):
        x = oracle.adjusted_logits(logits[i], s, prompts[i], generated[i], EOS)
        noise = noise_of(seeds[i] % 2**64, indices[i], positions[i])
        assert int(out.tokens[i]) in oracle.acceptable_tokens(x, s, noise)


LIMITS = [
    dict(zip(("temperature", "top_k", "top_p", "min_p"), v, strict=True))
    for v in itertools.product((0.5, 1.0), (0, 5, 40), (1.0, 0.6, 0.97), (0.0, 0.05))
]


@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_candidates_and_exact_path_choose_the_same(scale):
    generator = np.random.default_rng(3)
    B = len(LIMITS) * 8
    logits = jnp.asarray((np.round(generator.normal(size=(B, V)) * scale, 1) + 0.0).astype(np.float32))  # no -0
    fields = {k: np.repeat([limit[k] for limit in LIMITS], 8) for k in LIMITS[0]}
    limits = Limits(*(jnp.asarray(v, jnp.int32 if k == "top_k" else jnp.float32) for k, v in fields.items()))
    keys = jnp.asarray(generator.integers(0, 2**32, (B, 2), np.uint32))
    choose = jax.jit(select, static_argnames="num_candidates")
    outcomes = [np.asarray(choose(logits, limits, keys, num_candidates=n)) for n in (0, 20)]
    assert np.array_equal(outcomes[0], outcomes[1])


@pytest.mark.parametrize("num_candidates", [16, 0], ids=["candidates", "exact"])
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 2.0},
        {"top_k": 10},
        {"top_p": 0.8},
        {"min_p": 0.02},
        {"top_k": 30, "top_p": 0.95, "min_p": 0.01},
    ],
    ids=str,
)
def test_tokens_follow_their_distribution(asked, num_candidates):
    sampling = SamplingParams(**asked)
    draws, width = 8192, 64
    logits = np.random.default_rng(5).normal(size=width).astype(np.float32) * 1.5
    n = np.full(draws, 1)
    limits = Limits(
        jnp.asarray(n * sampling.temperature, jnp.float32),
        jnp.asarray(n * sampling.top_k, jnp.int32),
        jnp.asarray(n * sampling.top_p, jnp.float32),
        jnp.asarray(n * sampling.min_p, jnp.float32),
    )
    seed = jnp.tile(jnp.asarray([[3, 4]], jnp.uint32), (draws, 1))
    keys = row_keys(seed, jnp.zeros(draws, jnp.int32), jnp.arange(draws, dtype=jnp.int32))
    choose = jax.jit(select, static_argnames="num_candidates")
    tokens = choose(jnp.tile(logits[None], (draws, 1)), limits, keys, num_candidates=num_candidates)
    counts = np.bincount(np.asarray(tokens), minlength=width)
    kept = oracle.kept_tokens(logits.astype(np.float64), sampling)
    assert counts[np.setdiff1d(np.arange(width), kept)].sum() == 0
    p = np.exp((logits[kept].astype(np.float64) - logits.max()) / sampling.temperature)
    expected = draws * p / p.sum()
    statistic = ((counts[kept] - expected) ** 2 / expected).sum()
    freedom = kept.size - 1
    assert statistic < freedom + 5 * np.sqrt(2 * max(freedom, 1)) + 5


MIXED = [
    SamplingParams(seed=1, temperature=0.8),
    GREEDY,
    SamplingParams(top_p=0.9),
    SamplingParams(top_k=200, min_p=0.001, temperature=2.0),
    SamplingParams(top_k=3, frequency_penalty=1.0),
    SamplingParams(temperature=1.3, repetition_penalty=1.2, logit_bias={3: 4.0}),
    SamplingParams(top_p=0.999, temperature=2.0, logprobs=3),
    SamplingParams(min_tokens=9, presence_penalty=1.0),
]


def test_a_lane_does_not_depend_on_its_mates_or_its_place():
    logits = np.random.default_rng(0).normal(size=(R, V)).astype(np.float32)
    prompts = [[i, i + 1, i] for i in range(R)]
    seeds = list(range(100, 100 + R))
    together = run(logits, MIXED, prompts=prompts, generated=prompts, eos=EOS, seeds=seeds, num_candidates=16)
    order = np.random.default_rng(1).permutation(R)
    again = run(
        logits[order],
        [MIXED[i] for i in order],
        prompts=[prompts[i] for i in order],
        generated=[prompts[i] for i in order],
        eos=EOS,
        seeds=[seeds[i] for i in order],
        rows=order[::-1],
        num_candidates=16,
    )
    assert np.array_equal(together.tokens[order], again.tokens)
    for i in range(R):
        alone = run(
            logits[i : i + 1],
            MIXED[i : i + 1],
            prompts=prompts[i : i + 1],
            generated=prompts[i : i + 1],
            eos=EOS,
            seeds=seeds[i : i + 1],
            num_candidates=16,
        )
        assert alone.tokens[0] == together.tokens[i]


def test_one_program_serves_every_mixture():
    logits = np.random.default_rng(0).normal(size=(R, V)).astype(np.float32)
    run(logits, [GREEDY] * R)
    before = jit_sample._cache_size()
    run(logits, MIXED, eos=EOS)
    run(logits[:2], MIXED[5:7])
    assert jit_sample._cache_size() == before


def test_runs_inside_a_device_loop():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(R, V)).astype(np.float32))
    params = init_row_sampling(R, V)._replace(temperature=jnp.ones(R))
    counts, rows, zeros = init_token_counts(R, V), jnp.arange(R, dtype=jnp.int32), jnp.zeros(R, jnp.int32)

    def body(carry):
        i, out = carry
        tokens = sample(logits, params, rows, counts, jnp.full(R, i), zeros).tokens
        return i + 1, out.at[i].set(tokens)

    _, out = jax.jit(lambda: jax.lax.while_loop(lambda c: c[0] < 5, body, (0, jnp.zeros((5, R), jnp.int32))))()
    for i in range(5):
        assert np.array_equal(out[i], jit_sample(logits, params, rows, counts, jnp.full(R, i), zeros).tokens)


class TestSeeds:
    LOGITS = np.zeros((3, 300), np.float32)

    def tokens(self, samplings, **kwargs):
        return [run(self.LOGITS, samplings, positions=[p] * 3, **kwargs).tokens.tolist() for p in range(6)]

    def test_sixty_four_bits(self):
        one, big, negative = (SamplingParams(seed=s) for s in (1, 1 + 2**32, -1))
        got = np.array(self.tokens([one, big, negative]))
        assert (got[:, 0] != got[:, 1]).any()
        again = np.array(self.tokens([one, SamplingParams(seed=2**64 - 1), one]))
        assert np.array_equal(again[:, 1], got[:, 2])

    def test_samples_of_one_request_differ_and_repeat(self):
        samplings = [SamplingParams(seed=1, temperature=0.8, n=3)] * 3
        got = self.tokens(samplings, sample_indices=[0, 1, 2])
        assert got == self.tokens(samplings, sample_indices=[0, 1, 2])
        assert len({tuple(column) for column in zip(*got, strict=True)}) == 3

    def test_a_seeded_row_ignores_its_neighbours_seed(self):
        own = SamplingParams(seed=5)
        runs = [self.tokens([own, SamplingParams(), SamplingParams()], seeds=[0, k, 9]) for k in range(4)]
        runs.append(self.tokens([own, SamplingParams(seed=77), SamplingParams()], seeds=[3, 3, 3]))
        assert len({tuple(t[0] for t in one) for one in runs}) == 1


class TestSmallTemperature:
    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
    @pytest.mark.parametrize(
        "asked",
        [{"temperature": 1e-4}, {"temperature": 1e-40}, {"top_p": 1e-4}, {"top_k": 1}, {"top_p": 1e-300}],
        ids=str,
    )
    def test_equals_greedy(self, asked, dtype):
        logits = np.random.default_rng(2).permuted(np.tile(np.arange(V) / 4 - 30, (R, 1)), axis=1).astype(dtype)
        bias = {int(np.argmax(logits[i])): -100.0 for i in range(R)}
        for extra in ({}, {"logit_bias": bias}):
            greedy = run(logits, [SamplingParams(temperature=0, **extra)] * R).tokens
            for candidates in (128, 0) if dtype == np.float32 else (128,):
                got = run(logits, [SamplingParams(**{**asked, **extra})] * R, num_candidates=candidates).tokens
                assert np.array_equal(got, greedy)

    def test_a_row_without_numbers_still_gives_a_token(self):
        logits = np.full((4, V), np.nan, np.float32)
        samplings = [GREEDY, SamplingParams(), SamplingParams(top_k=4), SamplingParams(top_p=0.5)]
        for candidates in (128, 0):
            tokens = run(logits, samplings, num_candidates=candidates).tokens
            assert ((tokens >= 0) & (tokens < V)).all()


class TestPenalties:
    """What each of them counts: repetition looks at prompt and output, the others at the output alone."""

    LOGITS = np.zeros((1, V), np.float32)
    LOGITS[0, 5], LOGITS[0, 6] = 2.0, 1.9

    def token(self, prompt, generated, **asked):
        return int(
            run(self.LOGITS, [SamplingParams(temperature=0, **asked)], prompts=[prompt], generated=[generated]).tokens[
                0
            ]
        )

    def test_first_step_after_a_prompt_of_one_repeated_id(self):
        assert self.token([5] * 9, [], repetition_penalty=1.5) == 6
        assert self.token([5] * 9, [], presence_penalty=2.0) == 5
        assert self.token([5] * 9, [], frequency_penalty=2.0) == 5

    def test_later_steps_see_what_was_generated(self):
        assert self.token([5], [5], presence_penalty=0.2) == 6
        assert self.token([], [5], repetition_penalty=1.5) == 6
        assert self.token([], [5], frequency_penalty=0.05) == 5
        assert self.token([], [5] * 3, frequency_penalty=0.05) == 6

    def test_negative_logits_are_multiplied(self):
        logits = np.full((1, V), -9.0, np.float32)
        logits[0, 5], logits[0, 6] = -1.0, -1.1
        assert run(logits, [SamplingParams(temperature=0, repetition_penalty=1.5)], prompts=[[5]]).tokens[0] == 6

    def test_the_smallest_penalty_stays_finite(self):
        tokens = [self.token([6], [], repetition_penalty=p) for p in (1e-30, 1e-45, 1e-300)]
        assert tokens == [6, 6, 6]


class TestMinTokens:
    """Every end-of-sequence and stop id is held back, no other token is, and a bias does not undo it."""

    LOGITS = np.random.default_rng(4).normal(size=(1, V)).astype(np.float32)

    @pytest.mark.parametrize("ignore_eos", [False, True])
    @pytest.mark.parametrize("temperature", [0.0, 2.0])
    def test_holds_back_until_then(self, ignore_eos, temperature):
        bias = {7: 50.0, 11: 50.0, 20: 50.0}
        sampling = SamplingParams(
            temperature=temperature,
            min_tokens=50,
            max_tokens=60,
            ignore_eos=ignore_eos,
            logit_bias=bias,
            stop_token_ids=[20],
        )
        held = {7, 11, 20}
        for done in (0, 1, 49):
            assert (
                int(run(self.LOGITS, [sampling], prompts=[[7] * 9], generated=[[1] * done], eos=EOS).tokens[0])
                not in held
            )
        assert int(run(self.LOGITS, [sampling], generated=[[1] * 50], eos=EOS).tokens[0]) in held

    def test_everything_else_stays_as_likely(self):
        sampling = SamplingParams(seed=3, min_tokens=50, max_tokens=60)
        low = self.LOGITS.copy()
        low[0, list(EOS)] = -1e9
        for position in range(8):
            held = run(self.LOGITS, [sampling], eos=EOS, positions=[position]).tokens
            assert held == run(low, [SamplingParams(seed=3)], positions=[position]).tokens


def test_padding_of_the_head_is_never_chosen():
    logits = np.zeros((R, 128 * 3), np.float32)
    logits[:, :V] = -5 - np.random.default_rng(0).random((R, V))
    samplings = [GREEDY, *[SamplingParams(temperature=2.0, logprobs=20, seed=i) for i in range(R - 1)]]
    for position in range(20):
        out = run(logits, samplings, positions=[position] * R, vocab_size=V)
        assert (out.tokens < V).all()
        assert (out.top_ids < V).all()
    everything = oracle.logprobs(logits[1, :V], int(out.tokens[1]), 20)
    np.testing.assert_allclose(out.logprobs[1], everything[0], atol=1e-5)


def test_stop_ids():
    params = init_row_sampling(R, V)._replace()
    params = params._replace(stop_ids=params.stop_ids.at[2, :2].set(jnp.asarray([4, 9], jnp.int32)))
    rows = jnp.asarray([2, 2, 2, 1, R], jnp.int32)
    tokens = jnp.asarray([4, 9, 5, 4, 4], jnp.int32)
    assert is_stop(params, rows, tokens).tolist() == [True, True, False, False, False]
