"""Paged Gemma 3 against the numpy oracle; layer groups."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.models import Gemma3, ModelSpec, get_model
from pagedjax.models.groups import layer_groups
from tests.models.harness import PagedRun, random_checkpoint, tiny_spec
from tests.oracles import gemma_oracle


def gemma_spec(**changes) -> ModelSpec:
    values = {
        "architecture": "Gemma3ForCausalLM",
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 1,
        "head_dim": 32,
        "qk_norm": True,
        "tie_word_embeddings": True,
        "windows": (9, 9, 9, 0),
        "rope_theta": 1e6,
        "local_rope_theta": 1e4,
        "query_scale": 48**-0.5,
        "activation": "gelu_tanh",
    }
    return tiny_spec(**{**values, **changes})


VARIANTS = {
    "gemma3": {},
    "caps, untied, scaled": {
        "attention_soft_cap": 4.0,
        "logit_soft_cap": 5.0,
        "tie_word_embeddings": False,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "num_kv_heads": 2,
    },
    "two of five": {"num_layers": 5, "windows": (8, 0, 8, 0, 8)},
    "all see a window": {"windows": (7, 7, 7, 7)},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_chunks_and_decode_equal_the_oracle(variant):
    spec = gemma_spec(**VARIANTS[variant])
    tensors = random_checkpoint(spec)
    run = PagedRun(Gemma3.load(spec, tensors, jnp.float32), page_size=4)
    rng = np.random.default_rng(1)
    sequences = [rng.integers(0, spec.vocab_size, n).tolist() for n in (33, 20, 17)]
    got = [[], [], []]
    for cut, kind in (((8, 1, 0), None), ((31, 2, 9), None), ((32, 19, 16), None), ((33, 20, 17), 1)):
        before = run.lengths.copy()
        chunks = [s[a:b] for s, a, b in zip(sequences, before, cut, strict=True)]
        for i, logits in enumerate(run.feed(chunks, pad_to=3 if kind else 40, max_q_len=kind)):
            got[i].append(logits)
    for i, sequence in enumerate(sequences):
        want = gemma_oracle.forward(spec, tensors, sequence)
        np.testing.assert_allclose(np.concatenate(got[i]), want, rtol=0, atol=2e-5 * np.abs(want).max())


def test_bfloat16_stays_near_the_oracle():
    spec = gemma_spec()
    tensors = random_checkpoint(spec)
    run = PagedRun(Gemma3.load(spec, tensors, jnp.bfloat16), num_rows=1, dtype="bfloat16", page_size=4)
    sequence = np.random.default_rng(0).integers(0, spec.vocab_size, 20).tolist()
    got = np.concatenate([run.feed([sequence[:17]])[0], *(run.feed([[t]], max_q_len=1)[0] for t in sequence[17:])])
    want = gemma_oracle.forward(spec, tensors, sequence)
    assert np.abs(got - want).max() < 0.06 * np.abs(want).max()


def test_random_weights_make_a_model_of_the_same_kind():
    model = Gemma3.random(gemma_spec(), jnp.float32, seed=1)
    assert get_model("Gemma3ForCausalLM") is Gemma3
    assert np.isfinite(PagedRun(model, num_rows=1).feed([[1, 2, 3]])[0]).all()
    assert abs(float(model.final_norm[...].mean())) < 0.1


def test_layer_groups():
    assert layer_groups(3, ()) == ((0,), (0, 0, 0), (0, 1, 2), 3)
    assert layer_groups(2, (7, 7)) == ((7,), (0, 0), (0, 1), 2)
    gemma = layer_groups(18, (*(512,) * 5, 0) * 3)
    assert gemma.windows == (0, 512, 512, 512, 512, 512)
    assert gemma.num_places == 3
    assert [gemma.group.count(g) for g in range(6)] == [3] * 6
    # 22 and 4 layers: the last group of the 22 has two places to spare.
    uneven = layer_groups(26, tuple(0 if (i + 1) % 6 == 0 else 8 for i in range(26)))
    assert uneven.windows == (0, 8, 8, 8, 8, 8, 8)
    assert len(set(zip(uneven.group, uneven.place, strict=True))) == 26
    assert layer_groups(3, (0, 5, 12)) == ((0, 5, 12), (0, 1, 2), (0, 0, 0), 1)
