"""Noise that belongs to a token: a pure function of (seed, sample index, position, token id).

Nothing else enters, so a continuation does not depend on its batch mates, its lane, the shapes compiled, or on whether
the sampler looked at all tokens or at a few candidates. The row key is Threefry (`jax.random.fold_in`). Expanding it
over the vocabulary by Threefry as well would cost more than the model's head on a CPU, so that last step is an integer
hash: two rounds of a multiply-xorshift mixer of full avalanche, each keyed by one half of the row key.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


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
    return -_log(-_log_one_minus(jnp.minimum(w, 1 - 2.0**-24)))


# XLA's own log and log1p do not always become vector code on CPUs, and two of them per token and lane are most of what
# plain temperature sampling costs. These are products and sums only: half the time, error below 2e-6 in the noise.

_LN2 = 0.6931471805599453
# log(1 + f) = f - f^2 / 2 + f^3 P(f) for f in [sqrt(1/2) - 1, sqrt(2) - 1]; P as in the Cephes library's logf.
_LOG_P = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)


def _split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(e i32, m f32) with x = m 2^e and m in [sqrt(1/2), sqrt(2)), for a positive normal x."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    sqrt_half = 0x3F3504F3
    e = (bits - sqrt_half) >> 23
    return e, lax.bitcast_convert_type(bits - (e << 23), jnp.float32)


def _log_one_plus(f: jax.Array) -> jax.Array:
    p = jnp.full_like(f, _LOG_P[0])
    for c in _LOG_P[1:]:
        p = p * f + c
    return f - f * f * (0.5 - f * p)


def _log(x: jax.Array) -> jax.Array:
    e, m = _split(x)
    return _log_one_plus(m - 1.0) + e.astype(jnp.float32) * _LN2


def _log_one_minus(w: jax.Array) -> jax.Array:
    """log(1 - w) to full relative precision for small w, where 1 - w has lost it."""
    e, m = _split(1.0 - w)
    return _log_one_plus(jnp.where(e == 0, -w, m - 1.0)) + e.astype(jnp.float32) * _LN2
