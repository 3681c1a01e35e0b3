"""Shared by the sampling tests: one compiled sampler, fed from plain SamplingParams."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.sampling import (
    init_row_sampling,
    init_token_counts,
    reset_counts,
    row_values,
    sample,
    set_rows,
    stack_rows,
)
from pagedjax.types import SamplingParams

R = 8
jit_sample = jax.jit(sample, static_argnames="num_candidates")
jit_set_rows = jax.jit(set_rows)
jit_reset_counts = jax.jit(reset_counts)
GREEDY = SamplingParams(temperature=0)


@functools.cache
def empty_rows(vocab_size):
    return init_row_sampling(R, vocab_size), init_token_counts(R, vocab_size)


def run(
    logits,
    samplings,
    *,
    prompts=None,
    generated=None,
    eos=(),
    seeds=None,
    sample_indices=None,
    positions=None,
    rows=None,
    vocab_size=None,
    num_candidates=128,
):
    """Lane i of logits [B <= R, V] samples with samplings[i]; rows[i] says in which row its parameters live."""
    B = len(samplings)
    V = vocab_size or logits.shape[1]
    rows = np.arange(B) if rows is None else np.asarray(rows)
    prompts, generated = prompts or [[]] * B, generated or [[]] * B
    padded = lambda values, fill: jnp.asarray(np.r_[values, np.full(R - len(values), fill)], jnp.int32)  # noqa: E731
    params, counts = empty_rows(V)
    values = [
        row_values(
            s,
            vocab_size=V,
            eos_token_ids=eos,
            seed=0 if seeds is None else seeds[i],
            sample_index=0 if sample_indices is None else sample_indices[i],
        )
        for i, s in enumerate(samplings)
    ]
    lanes = padded(rows, R)
    params = jit_set_rows(params, lanes, stack_rows(values, R))
    history = [[*p, *g] for p, g in zip(prompts, generated, strict=True)]
    ids = np.zeros((R, 64), np.int32)
    for i, h in enumerate(history):
        ids[i, : len(h)] = h
    lengths = [padded([len(x) for x in xs], 0) for xs in (prompts, history)]
    counts = jit_reset_counts(counts, lanes, jnp.asarray(ids), *lengths)
    full = np.zeros((R, logits.shape[1]), np.float32)
    full[:B] = logits
    dtype = logits.dtype if logits.dtype != np.float64 else np.float32
    out = jit_sample(
        jnp.asarray(full, dtype),
        params,
        lanes,
        counts,
        padded(np.zeros(B) if positions is None else positions, 0),
        padded([len(g) for g in generated], 0),
        num_candidates=num_candidates,
    )
    return jax.tree.map(lambda x: np.asarray(x)[:B], out)
