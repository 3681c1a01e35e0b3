"""The Llama family (Llama 2 and 3, SmolLM2, TinyLlama, Mistral, Qwen2, Qwen3) over paged keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from pagedjax_kernels import KVCache

from pagedjax.models import parameters
from pagedjax.models.spec import ModelSpec
from pagedjax.nn import Batch, PagedAttention, RotaryTable, apply_rotary, linear, rms_norm


class LayerPlace(NamedTuple):
    """Where a layer's keys and values are and what it sees; numbers, or i32 scalars inside a scan over layers."""

    layer: jax.Array | int  # in its group's cache
    group: jax.Array | int
    window: jax.Array | int  # 0: it sees all


class Layers(nnx.Module):
    """The layers' parameters, each stacked on a leading L axis. See parameters.layer_parameters for the shapes."""

    def __init__(self, arrays: Mapping[str, jax.Array]):
        self.names = tuple(arrays)
        for name, array in arrays.items():
            setattr(self, name, nnx.Param(array))

    def arrays(self) -> dict[str, jax.Array]:
        return {name: getattr(self, name)[...] for name in self.names}


class Llama(nnx.Module):
    """A decoder whose keys and values live in pages.

    For a jitted step: `graphdef, params = nnx.split(model)` once, `nnx.merge(graphdef, params)` inside. The weights are
    then an ordinary argument, and the cache, also an argument, is donated.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs | None = None,
        arrays: tuple[Mapping[str, jax.Array], Mapping[str, jax.Array]] | None = None,
    ):
        """
        Args:
          spec: what the model is.
          dtype: of random weights.
          rngs: draws random weights, for tests and for training from scratch. Needed unless `arrays` are given.
          arrays: (outer, layers), the weights under the names of parameters.outer_parameters and layer_parameters.
        """
        if arrays is None:
            if rngs is None:
                raise ValueError("Llama needs rngs (random weights) or arrays")
            arrays = parameters.random_parameters(spec, dtype, rngs.params())
        outer, layers = arrays
        self.spec = spec
        self.embedding = nnx.Param(outer["embedding"])
        self.final_norm = nnx.Param(outer["final_norm"])
        self.head = None if spec.tie_word_embeddings else nnx.Param(outer["head"])
        self.layers = Layers(layers)
        self.attention = PagedAttention(
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            scale=spec.query_scale,
            soft_cap=spec.attention_soft_cap,
        )

    @classmethod
    def load(cls, spec: ModelSpec, tensors: Mapping[str, np.ndarray], dtype: Any) -> Self:
        """A model from a checkpoint's tensors.

        Args:
          spec: what the model is.
          tensors: arrays under Hugging Face names ("model.layers.0.self_attn.q_proj.weight", ...) and in its
            orientation, [out, in]; any floating dtype. Read one after the other, so the mapping may be lazy.
          dtype: of the weights and of the residual stream.

        Raises:
          ModelLoadError: a tensor that is missing or misshaped; names it.
        """
        return cls(spec, arrays=parameters.load_parameters(spec, tensors, dtype))

    @classmethod
    def random(cls, spec: ModelSpec, dtype: Any = jnp.float32, seed: int = 0) -> Self:
        """A model with random weights, the same for the same seed."""
        return cls(spec, dtype=dtype, rngs=nnx.Rngs(params=seed))

    @property
    def dtype(self) -> Any:
        return self.embedding[...].dtype

    def __call__(self, batch: Batch, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Runs all layers over the step's tokens, writing their keys and values.

        Args:
          batch: T tokens of B rows (see Batch).
          cache: [L/G, N, S, 2K, D], the layers of a group (spec.groups); donate it.

        Returns:
          (hidden [T, d] after the final norm, in the weights' dtype; the updated cache). Rows of padding tokens hold
          finite values of no meaning.
        """
        x = self._embed(batch.token_ids)
        groups = self.spec.groups
        place = jnp.asarray(groups.place, jnp.int32)
        group = jnp.asarray(groups.group, jnp.int32)
        window = jnp.asarray(self.spec.windows or (0,) * self.spec.num_layers, jnp.int32)
        same = len(set(groups.windows)) == 1

        def layer(carry: tuple[jax.Array, KVCache], scanned: tuple) -> tuple[tuple[jax.Array, KVCache], None]:
            x, cache = carry
            weights, place = scanned
            if same:  # one group; nothing differs between layers
                place = LayerPlace(place.layer, 0, groups.windows[0])
            return self._layer(x, weights, cache, place, batch), None

        # The cache is carried, never scanned over: XLA updates a carry in place, and copies xs and ys.
        (x, cache), _ = lax.scan(layer, (x, cache), (self.layers.arrays(), LayerPlace(place, group, window)))
        return self._norm(x, self.final_norm[...]), cache

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [..., d] -> f32[..., V], real vocabulary only: padded rows of the head do not show."""
        table = self.embedding[...] if self.head is None else self.head[...]
        flat = hidden.reshape(-1, hidden.shape[-1])
        # [V, d] is the layout of embedding look-ups; contracting its second axis needs no transposed copy.
        y = lax.dot_general(
            flat,
            table,
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST if table.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )
        y = y[:, : self.spec.vocab_size].reshape(*hidden.shape[:-1], self.spec.vocab_size)
        cap = self.spec.logit_soft_cap
        return y if cap is None else cap * jnp.tanh(y / cap)

    def _embed(self, token_ids: jax.Array) -> jax.Array:
        return self.embedding[...].at[token_ids].get(mode="clip")

    def _norm(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return rms_norm(x, weight, self.spec.norm_eps)

    def _rotary(self, window: jax.Array | int) -> RotaryTable:
        """The rotary frequencies of a layer with this window."""
        del window
        return self.spec.rotary

    def _layer(
        self, x: jax.Array, weights: Mapping[str, jax.Array], cache: KVCache, place: LayerPlace, batch: Batch
    ) -> tuple[jax.Array, KVCache]:
        y, cache = self._attend(self._norm(x, weights["attention_norm"]), weights, cache, place, batch)
        x = x + y
        return x + self._mlp(self._norm(x, weights["mlp_norm"]), weights), cache

    def _attend(
        self, x: jax.Array, weights: Mapping[str, jax.Array], cache: KVCache, place: LayerPlace, batch: Batch
    ) -> tuple[jax.Array, KVCache]:
        spec = self.spec
        qkv = linear(x, weights["qkv"])  # f32[T, K, H/K + 2, D]
        if "qkv_bias" in weights:
            qkv = qkv + weights["qkv_bias"].astype(jnp.float32)[None]
        qkv = qkv.astype(x.dtype)
        q = qkv[:, :, :-2].reshape(x.shape[0], spec.num_heads, spec.head_dim)
        k, v = qkv[:, :, -2], qkv[:, :, -1]
        if "q_norm" in weights:
            q, k = self._norm(q, weights["q_norm"]), self._norm(k, weights["k_norm"])
        rotary = self._rotary(place.window)
        q, k = apply_rotary(q, batch.positions, rotary), apply_rotary(k, batch.positions, rotary)
        out, cache = self.attention(q, k, v, cache, place.layer, batch, group=place.group, window=place.window)
        y = linear(out, weights["out"], num_contracted=3)
        if "out_bias" in weights:
            y = y + weights["out_bias"].astype(jnp.float32)[None]
        return y.astype(x.dtype), cache

    def _mlp(self, x: jax.Array, weights: Mapping[str, jax.Array]) -> jax.Array:
        y = linear(x, weights["gate_up"])  # f32[T, 2, f]
        if "gate_up_bias" in weights:
            y = y + weights["gate_up_bias"].astype(jnp.float32)[None]
        activate = jax.nn.silu if self.spec.activation == "silu" else jax.nn.gelu  # gelu: its tanh form
        y = (activate(y[:, 0]) * y[:, 1]).astype(x.dtype)
        y = linear(y, weights["down"])
        if "down_bias" in weights:
            y = y + weights["down_bias"].astype(jnp.float32)[None]
        return y.astype(x.dtype)
