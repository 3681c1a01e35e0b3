"""PagedAttention: write this step's keys and values into their pages, then attend."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from pagedjax_kernels import KVCache, kv_update, paged_attention

from pagedjax.nn.batch import Batch


class PagedAttention(nnx.Module):
    """Causal attention of a layer over paged keys and values, for any Flax model.

    Stands where a model would call dot-product attention: after its own projections, head norms and rotary embedding.
    It has no parameters of its own but, optionally, attention sinks.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        window: int | None = None,
        use_sinks: bool = False,
    ):
        """
        Args:
          num_heads: H query heads.
          num_kv_heads: K, a divisor of H; query head h reads KV head h // (H // K).
          head_dim: D.
          scale: factor on q . k; None: D ** -0.5.
          soft_cap: scores become c * tanh(score / c). None: off.
          window: positions that a query sees, itself included. None or 0: all.
          use_sinks: have a parameter `sinks` f32[H], a logit per head that takes part in the softmax without a value.

        Raises:
          ValueError: num_heads is not a multiple of num_kv_heads.
        """
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scale, self.soft_cap, self.window = scale, soft_cap, window
        self.sinks = nnx.Param(jnp.zeros(num_heads, jnp.float32)) if use_sinks else None

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: KVCache,
        layer: jax.Array | int,
        batch: Batch,
        group: jax.Array | int = 0,
        window: jax.Array | int | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """
        Args:
          q: [T, H, D].
          k: [T, K, D]; cast to the pages' dtype, or quantised.
          v: [T, K, D].
          cache: the pages of all layers of the group; donate them to the jitted step.
          layer: this layer's index in the cache, static or traced.
          batch: the step.
          group: which of batch.page_table's G tables, static or traced.
          window: overrides the module's, for a scan over layers that differ; a traced scalar, 0: all.

        Returns:
          (out [T, H, D] in q's dtype, the updated cache). Zeros for padding tokens.
        """
        slots = batch.slot_mapping if batch.slot_mapping.ndim == 1 else batch.slot_mapping[group]
        cache = kv_update(cache, k, v, layer, slots)
        out = paged_attention(
            q,
            cache,
            layer,
            batch.page_table[group],
            batch.kv_lens,
            batch.cu_q_lens,
            scale=self.scale,
            soft_cap=self.soft_cap,
            window=self.window if window is None else window,
            sinks=None if self.sinks is None else self.sinks[...],
            max_q_len=batch.max_q_len,
            backend=batch.backend,
        )
        return out, cache
