"""Gemma 3 (text) over paged keys and values: what differs from the Llama family."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from pagedjax_kernels import KVCache

from pagedjax.models.llama import LayerPlace, Llama
from pagedjax.nn import Batch, RotaryTable, centered_rms_norm


class Gemma3(Llama):
    """Five of six layers see a window (spec.windows) and rotate by another base (spec.local_rope_theta).

    Norms stand before and behind attention and MLP, and their weights are stored less one; the embedding is multiplied by
    sqrt(d). Layers are scanned all the same: what they differ in is data.
    """

    def _embed(self, token_ids: jax.Array) -> jax.Array:
        x = super()._embed(token_ids)
        # In the weights' precision, as the published weights were trained: sqrt(3072) is 55.5 in bfloat16.
        return x * jnp.asarray(self.spec.hidden_size**0.5, x.dtype)

    def _norm(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return centered_rms_norm(x, weight, self.spec.norm_eps)

    def _rotary(self, window: jax.Array | int) -> RotaryTable:
        whole, local = self.spec.rotary, self.spec.local_rotary
        is_local = jnp.asarray(window, jnp.int32) > 0
        inv_freq = jnp.where(is_local, np.asarray(local.inv_freq, np.float32), np.asarray(whole.inv_freq, np.float32))
        factor = jnp.where(is_local, np.float32(local.attention_factor), np.float32(whole.attention_factor))
        return RotaryTable(inv_freq, factor)

    def _layer(
        self, x: jax.Array, weights: Mapping[str, jax.Array], cache: KVCache, place: LayerPlace, batch: Batch
    ) -> tuple[jax.Array, KVCache]:
        y, cache = self._attend(self._norm(x, weights["attention_norm"]), weights, cache, place, batch)
        x = x + self._norm(y, weights["post_attention_norm"])
        y = self._mlp(self._norm(x, weights["mlp_norm"]), weights)
        return x + self._norm(y, weights["post_mlp_norm"]), cache
