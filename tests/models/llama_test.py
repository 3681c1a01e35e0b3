"""Paged Llama against the dense numpy oracle."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.models import Llama
from tests.models.harness import PagedRun, random_checkpoint, tiny_spec
from tests.oracles import llama_oracle

VARIANTS = {
    "llama": {},
    "tied": {
        "tie_word_embeddings": True,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "biases": {
        "attention_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "qwen3": {
        "qk_norm": True,
        "head_dim": 32,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "mistral": {"windows": (9, 9, 9), "num_kv_heads": 6},
    "mixed_windows": {"windows": (0, 5, 12), "num_kv_heads": 1, "attention_bias": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_chunks_and_decode_equal_the_oracle(variant):
    spec = tiny_spec(**VARIANTS[variant])
    tensors = random_checkpoint(spec)
    run = PagedRun(Llama.load(spec, tensors, jnp.float32))
    rng = np.random.default_rng(1)
    sequences = [rng.integers(0, spec.vocab_size, n).tolist() for n in (33, 20, 17)]
    got = [[], [], []]
    # A mixed step, a chunk beside decode rows, an absent row, and pure decode.
    for cut, kind in (
        ((8, 1, 0), None),
        ((24, 2, 9), None),
        ((25, 17, 10), None),
        ((26, 18, 10), 1),
        ((27, 19, 11), 1),
        ((33, 20, 17), None),
    ):
        before = run.lengths.copy()
        chunks = [s[a:b] for s, a, b in zip(sequences, before, cut, strict=True)]
        for i, logits in enumerate(run.feed(chunks, pad_to=3 if kind else 32, max_q_len=kind)):
            got[i].append(logits)
    for i, sequence in enumerate(sequences):
        want = llama_oracle.forward(spec, tensors, sequence)
        np.testing.assert_allclose(np.concatenate(got[i]), want, rtol=0, atol=2e-5 * np.abs(want).max())
