"""Random checkpoints, and a driver that runs a model over pages with a fixed, scattered page table."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from pagedjax_kernels import init_cache

from pagedjax.models import ModelSpec
from pagedjax.nn import Batch


def tiny_spec(**changes) -> ModelSpec:
    values = {
        "architecture": "LlamaForCausalLM",
        "num_layers": 3,
        "hidden_size": 48,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 80,
        "vocab_size": 101,
        "max_position_embeddings": 256,
    }
    return ModelSpec(**{**values, **changes})


def random_checkpoint(spec: ModelSpec, seed: int = 0, num_vocab_rows: int | None = None) -> dict[str, np.ndarray]:
    """float32 tensors under Hugging Face names."""
    rng = np.random.default_rng(seed)
    d, f, rows = spec.hidden_size, spec.intermediate_size, num_vocab_rows or spec.vocab_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    out: dict[str, np.ndarray] = {}

    def put(name: str, *shape: int, bias: bool = False) -> None:
        out[f"{name}.weight"] = (rng.normal(size=shape) * shape[-1] ** -0.5).astype(np.float32)
        if bias:
            out[f"{name}.bias"] = rng.normal(size=shape[0]).astype(np.float32) * 0.2

    def norm(name: str, size: int) -> None:
        x = (0.2 * rng.normal(size=size)).astype(np.float32)
        # Stored less one: of few digits, so that adding the one and taking it off again is exact.
        out[f"{name}.weight"] = np.round(x * 1024) / 1024 + 0.0 if spec.norms_around else 1 + x

    put("model.embed_tokens", rows, d)
    out["model.embed_tokens.weight"] *= 0.5 if spec.norms_around else 4  # Gemma multiplies by sqrt(d) itself
    for i in range(spec.num_layers):
        layer = f"model.layers.{i}"
        for name, size in (("q", q), ("k", kv), ("v", kv)):
            put(f"{layer}.self_attn.{name}_proj", size, d, bias=spec.attention_bias)
        put(f"{layer}.self_attn.o_proj", d, q, bias=spec.attention_out_bias)
        for name in ("gate", "up"):
            put(f"{layer}.mlp.{name}_proj", f, d, bias=spec.mlp_bias)
        put(f"{layer}.mlp.down_proj", d, f, bias=spec.mlp_bias)
        norm(f"{layer}.input_layernorm", d)
        norm(f"{layer}.post_attention_layernorm", d)
        if spec.qk_norm:
            norm(f"{layer}.self_attn.q_norm", spec.head_dim)
            norm(f"{layer}.self_attn.k_norm", spec.head_dim)
        if spec.norms_around:
            norm(f"{layer}.pre_feedforward_layernorm", d)
            norm(f"{layer}.post_feedforward_layernorm", d)
    norm("model.norm", d)
    if not spec.tie_word_embeddings:
        put("lm_head", rows, d)
    return out


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _step(graphdef, params, batch, cache):
    model = nnx.merge(graphdef, params)
    hidden, cache = model(batch, cache)
    return model.logits(hidden), cache


class PagedRun:
    """Feeds chunks of several sequences through a model, each row in pages of its own, scattered over the pool."""

    def __init__(self, model, *, num_rows=3, max_tokens=64, page_size=8, dtype="float32", backend="auto", seed=0):
        spec = model.spec
        self.graphdef, self.params = nnx.split(model)
        self.page_size, self.backend = page_size, backend
        self.windows = spec.groups.windows
        pages = -(-max_tokens // page_size)
        num_pages = 1 + len(self.windows) * num_rows * pages
        cache = init_cache(spec.groups.num_places, num_pages, page_size, spec.num_kv_heads, spec.head_dim, dtype)
        if cache.scales is None:  # what was never written must never be read
            cache = cache._replace(kv_pages=jnp.full(cache.kv_pages.shape, jnp.nan, cache.kv_pages.dtype))
        self.cache = cache
        order = np.random.default_rng(seed).permutation(np.arange(1, num_pages)).astype(np.int32)
        self.table = order.reshape(len(self.windows), num_rows, pages)
        self.lengths = np.zeros(num_rows, np.int32)
        self.num_slots = num_pages * page_size

    def feed(
        self, chunks: Sequence[Sequence[int]], *, pad_to: int = 0, max_q_len: int | None = None
    ) -> list[np.ndarray]:
        """One step: row i goes on with chunks[i] (may be empty). Returns each row's logits [len(chunk), V]."""
        num_rows = len(self.lengths)
        rows = [i for i in range(num_rows) for _ in chunks[i]]
        if max_q_len == 1:  # token b is row b's, whether it has one or not
            rows = list(range(num_rows))
            ids = [chunks[i][0] if chunks[i] else 0 for i in rows]
            positions = self.lengths.copy()
            real = np.array([len(chunk) == 1 for chunk in chunks])
        else:
            ids = [token for chunk in chunks for token in chunk]
            positions = np.concatenate([np.arange(n, n + len(c)) for n, c in zip(self.lengths, chunks, strict=True)])
            real = np.ones(len(ids), bool)
        num_tokens = max(pad_to, len(ids))
        slots = np.tile(self.num_slots + np.arange(num_tokens), (len(self.windows), 1))
        for t, (row, position) in enumerate(zip(rows, positions, strict=True)):
            if real[t]:
                page, offset = divmod(position, self.page_size)
                slots[:, t] = self.table[:, row, page] * self.page_size + offset
        counts = np.array([len(c) for c in chunks])
        self.lengths += counts
        pad = lambda x: jnp.asarray(np.pad(np.asarray(x, np.int32), (0, num_tokens - len(x))))  # noqa: E731
        batch = Batch(
            token_ids=pad(ids),
            positions=pad(positions),
            slot_mapping=jnp.asarray(slots, jnp.int32),
            page_table=jnp.asarray(self._table_without_what_no_window_sees(chunks)),
            kv_lens=jnp.asarray(np.where(counts > 0, self.lengths, 0), jnp.int32),
            cu_q_lens=jnp.asarray(np.concatenate([[0], np.cumsum(counts)]), jnp.int32),
            max_q_len=max_q_len,
            backend=self.backend,
        )
        logits, self.cache = _step(self.graphdef, self.params, batch, self.cache)
        logits = np.asarray(logits)
        if max_q_len == 1:
            return [logits[i : i + 1] if chunks[i] else logits[:0] for i in range(num_rows)]
        return np.split(logits[: len(ids)], np.cumsum(counts)[:-1])

    def _table_without_what_no_window_sees(self, chunks: Sequence[Sequence[int]]) -> np.ndarray:
        """The table with NULL_PAGE, which holds NaN here too, where a window has passed."""
        table = self.table.copy()
        for group, window in enumerate(self.windows):
            for row, chunk in enumerate(chunks):
                first_query = self.lengths[row] - len(chunk)
                if window:
                    table[group, row, : max(first_query - window + 1, 0) // self.page_size] = 0
        return table
