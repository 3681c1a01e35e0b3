"""Paged Llama against the dense numpy oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pagedjax_kernels import init_cache
from pagedjax_kernels.compat import JAX_VERSION

from pagedjax.errors import ModelLoadError
from pagedjax.models import Llama
from pagedjax.nn import Batch
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


@pytest.mark.smoke
def test_chunking_does_not_change_the_logits():
    """Whole, in chunks of three sizes, token by token, and as pure decode: the same within rounding."""
    spec = tiny_spec(windows=(0, 6, 0))
    model = Llama.random(spec, seed=3)
    sequence = np.random.default_rng(0).integers(0, spec.vocab_size, 29).tolist()
    whole = PagedRun(model, num_rows=1).feed([sequence], pad_to=32)[0]
    for chunk, kind in ((1, None), (1, 1), (7, None), (16, None)):
        run = PagedRun(model, num_rows=1, seed=chunk)
        pad_to = 1 if kind else 32  # two programs in all
        parts = [run.feed([sequence[i : i + chunk]], pad_to=pad_to, max_q_len=kind)[0] for i in range(0, 29, chunk)]
        np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-5)


def test_bfloat16_stays_near_the_oracle():
    spec = tiny_spec()
    tensors = random_checkpoint(spec)
    run = PagedRun(Llama.load(spec, tensors, jnp.bfloat16), num_rows=1, dtype="bfloat16")
    sequence = np.random.default_rng(0).integers(0, spec.vocab_size, 20).tolist()
    got = np.concatenate([run.feed([sequence[:17]])[0], *(run.feed([[t]], max_q_len=1)[0] for t in sequence[17:])])
    assert got.dtype == np.float32
    want = llama_oracle.forward(spec, tensors, sequence)
    assert np.abs(got - want).max() < 0.06 * np.abs(want).max()


@pytest.mark.parametrize("cache_dtype", ["int8", "float8_e4m3fn"])
def test_quantised_pages_stay_near_the_oracle(cache_dtype):
    spec = tiny_spec(head_dim=80, num_heads=2)
    tensors = random_checkpoint(spec)
    run = PagedRun(Llama.load(spec, tensors, jnp.float32), num_rows=1, dtype=cache_dtype)
    sequence = np.random.default_rng(0).integers(0, spec.vocab_size, 20).tolist()
    want = llama_oracle.forward(spec, tensors, sequence)
    assert np.abs(run.feed([sequence])[0] - want).max() < 0.1 * np.abs(want).max()


def test_tied_head_is_the_embedding_with_and_without_a_spare_one():
    spec = tiny_spec(tie_word_embeddings=True)
    tensors = random_checkpoint(spec)
    spare = {**tensors, "lm_head.weight": np.full((spec.vocab_size, spec.hidden_size), 1e9, np.float32)}
    logits = [PagedRun(Llama.load(spec, t, jnp.float32), num_rows=1).feed([[1, 2, 3]])[0] for t in (tensors, spare)]
    np.testing.assert_array_equal(*logits)
    np.testing.assert_allclose(logits[0], llama_oracle.forward(spec, tensors, [1, 2, 3]), atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_padded_vocabulary_rows_do_not_show(tied):
    """Rows of zeros beyond the vocabulary, and weights that make every real logit negative."""
    spec = tiny_spec(tie_word_embeddings=tied, vocab_size=101)
    tensors = random_checkpoint(spec, num_vocab_rows=128)
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    tensors[name][101:] = 0
    model = Llama.load(spec, tensors, jnp.float32)
    hidden = -tensors[name][:101].sum(0)
    logits = np.asarray(model.logits(jnp.asarray(hidden)))
    assert logits.shape == (101,)
    got = PagedRun(model, num_rows=1).feed([[5, 6]])[0]
    assert got.shape == (2, 101)
    np.testing.assert_allclose(got, llama_oracle.forward(spec, tensors, [5, 6]), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, "no tensor 'model.layers.1.mlp.up_proj.weight'"),
        ("lm_head.weight", None, "no tensor 'lm_head.weight'"),
        ("model.norm.weight", np.zeros(7, np.float32), r"'model.norm.weight' must have shape \(48,\), got \(7,\)"),
        ("model.layers.0.self_attn.k_proj.weight", np.zeros((48, 32), np.float32), r"must have shape \(32, 48\)"),
        ("model.layers.2.self_attn.q_proj.weight", np.zeros((96, 48), np.int8), "must be floating point, got int8"),
        ("model.embed_tokens.weight", np.zeros((50, 48), np.float32), "50 rows, fewer than vocab_size = 101"),
    ],
)
def test_a_tensor_that_is_wrong_is_named(name, change, message):
    spec = tiny_spec()
    tensors = random_checkpoint(spec)
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change
    with pytest.raises(ModelLoadError, match=message):
        Llama.load(spec, tensors, jnp.float32)


def test_checkpoints_of_the_bare_decoder_load():
    spec = tiny_spec(tie_word_embeddings=True)
    tensors = random_checkpoint(spec)
    bare = {name.removeprefix("model."): x for name, x in tensors.items()}
    a, b = (nnx.state(Llama.load(spec, t, jnp.float32)) for t in (tensors, bare))
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_random_is_reproducible():
    a, b, c = (nnx.state(Llama.random(tiny_spec(), jnp.bfloat16, seed=s)) for s in (1, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert not np.array_equal(a["embedding"][...], c["embedding"][...])
    with pytest.raises(ValueError, match="rngs"):
        Llama(tiny_spec())


# XLA's CPU backend in JAX 0.10 slices bfloat16 weights by widening all of them, once a step.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"] if JAX_VERSION >= (0, 12) else ["float32"])
def test_a_step_copies_neither_the_pages_nor_the_weights(dtype):
    """By the compiler's account, at the default model's widths (nothing is allocated): no copy of the cache, no
    transposed embedding for the head, no widened weights."""
    spec = tiny_spec(
        num_layers=4, hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64, intermediate_size=1536,
        vocab_size=49152, tie_word_embeddings=True,
    )  # fmt: skip
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Llama.random(spec, jnp.dtype(dtype))))
    cache = jax.eval_shape(lambda: init_cache(4, 8192, 16, 3, 64, dtype))
    i32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    batch = Batch(i32(8), i32(8), i32(8), i32(1, 8, 4), i32(8), i32(9), max_q_len=1)

    def step(params, batch, cache):
        model = nnx.merge(graphdef, params)
        hidden, cache = model(batch, cache)
        return jnp.argmax(model.logits(hidden), axis=-1), cache

    memory = jax.jit(step, donate_argnums=2).lower(params, batch, cache).compile().memory_analysis()
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    assert memory.alias_size_in_bytes >= size(cache)
    assert memory.temp_size_in_bytes < 20 * 2**20 < min(size(params), size(cache)) / 3
