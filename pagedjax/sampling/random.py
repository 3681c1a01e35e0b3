"""Noise that belongs to a token: a pure function of (seed, sample index, position, token id).

Nothing else enters, so a continuation does not depend on its batch mates, its lane, the shapes compiled, or on whether
the sampler looked at all tokens or at a few candidates. The row key is Threefry (`jax.random.fold_in`). Expanding it
over the vocabulary by Threefry as well would cost more than the model's head on a CPU, so that last step is an integer
hash: two rounds of a multiply-xorshift mixer of full avalanche, each keyed by one half of the row key.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def row_keys(seed: jax.Array, sample_index: jax.Array, positions: jax.Array) -> jax.Array:
    """u32[B, 2]: fold_in(fold_in(seed, sample index), position).

    Args:
      seed: u32[B, 2], high and low half of the seed.
      sample_index: i32[B].
      positions: i32[B], the position that the new token will have in its sequence.
    """
    keys = jax.random.wrap_key_data(seed, impl="threefry2x32")
    fold = jax.vmap(jax.random.fold_in)
    return jax.random.key_data(fold(fold(keys, sample_index), positions))


def _mix(x: jax.Array) -> jax.Array:
    """C. Wellons' `lowbias32`, the 32-bit multiply-xorshift bijection with the least known avalanche bias (0.17)."""
    x = x ^ (x >> 16)
    x = x * jnp.uint32(0x7FEB352D)
    x = x ^ (x >> 15)
    x = x * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def token_bits(keys: jax.Array, token_ids: jax.Array) -> jax.Array:
    """u32[B, M]: 32 random bits for each token.

    Args:
      keys: u32[B, 2] of `row_keys`.
      token_ids: i32[B, M] or i32[1, M].
    """
    return _mix(_mix(token_ids.astype(jnp.uint32) ^ keys[:, :1]) ^ keys[:, 1:])


def gumbel(keys: jax.Array, token_ids: jax.Array) -> jax.Array:
    """f32[B, M]: standard Gumbel noise in [-2.9, 22.2], finite.

    -log(E) with E = -log(1 - w) exponential, w uniform: the large values, which decide, come from small w, where a
    float32 is dense.
    """
    bits = token_bits(keys, token_ids)
    # 31 bits, because every instruction set converts signed integers.
    w = ((bits >> 1).astype(jnp.int32).astype(jnp.float32) + 0.5) * 2.0**-31
    return -jnp.log(-jnp.log1p(-jnp.minimum(w, 1 - 2.0**-24)))
