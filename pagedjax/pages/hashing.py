"""The prefix hash. It only finds candidates; token ids and parent links decide: a collision costs time, never truth.

Written in operators that NumPy and JAX share, so that `check` recomputes on the host what the verbs computed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Words = Any  # u32 array of NumPy or JAX


def _u32(x: int) -> np.ndarray:
    return np.asarray(x, np.uint32)


def _mix(x: Words) -> Words:
    """A bijection of u32 under which every input bit moves about half of the output bits (C. Wellons, "lowbias32")."""
    with np.errstate(over="ignore"):  # NumPy warns of wrapping where both factors are scalars
        x = (x ^ (x >> _u32(16))) * _u32(0x7FEB352D)
        x = (x ^ (x >> _u32(15))) * _u32(0x846CA68B)
        return x ^ (x >> _u32(16))


def page_digests(tokens: Words, secret: Words) -> Words:
    """One word for the content of each page, wherever it stands.

    Args:
      tokens: u32[..., S].
      secret: u32[2].

    Returns:
      u32[...]
    """
    salt = _mix(np.arange(1, tokens.shape[-1] + 1, dtype=np.uint32) * _u32(0x9E3779B9) + secret[0])
    salt = salt.reshape((1,) * (tokens.ndim - 1) + salt.shape)
    # The product makes the position matter beyond a shift, so that exchanging two tokens changes the sum.
    return _mix(_mix(tokens * (salt | _u32(1)) + salt).sum(-1, dtype=np.uint32) + secret[1])


def chain_seed(namespace: Words, secret: Words) -> Words:
    """The state u32 before the first page of a chain in a namespace u32."""
    return _mix(_mix(namespace + secret[0]) ^ secret[1])


def multiplier(secret: Words) -> Words:
    """Odd word by which the state is multiplied before a page's digest is added."""
    return _mix(secret[1] + _u32(0x85EBCA6B)) | _u32(1)


def finish(state: Words, secret: Words, bits: int) -> Words:
    """The hash of a chain from its state; of `bits` bits."""
    return _mix(state + secret[0]) & _u32((1 << bits) - 1)


def prefix_hashes(tokens: jax.Array, namespace: jax.Array, secret: jax.Array, bits: int) -> jax.Array:
    """Hash of pages 0..i of one row, for every i at once: the states are compositions of affine maps.

    Args:
      tokens: i32[P, S] the row's pages.
      namespace: i32.
      secret: u32[2].

    Returns:
      u32[P]
    """
    if tokens.shape[0] == 0:
        return jnp.zeros(0, jnp.uint32)
    digest = page_digests(tokens.astype(jnp.uint32), secret)
    factor = jnp.broadcast_to(multiplier(secret), digest.shape)

    def compose(first: tuple[jax.Array, jax.Array], then: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return first[0] * then[0], first[1] * then[0] + then[1]

    factor, offset = lax.associative_scan(compose, (factor, digest))
    return finish(factor * chain_seed(namespace.astype(jnp.uint32), secret) + offset, secret, bits)
