"""Quality of the noise: uniform, and independent between tokens, positions, samples and seeds.

All seeds are fixed, so nothing here can flake; thresholds are at about seven standard deviations.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.sampling.random import gumbel, row_keys, token_bits


def keys_at(positions, seed=(0, 1), sample_index=0):
    positions = jnp.asarray(positions, jnp.int32)
    n = positions.shape[0]
    return row_keys(jnp.tile(jnp.asarray([seed], jnp.uint32), (n, 1)), jnp.full(n, sample_index, jnp.int32), positions)


def bits_of(keys, num_tokens):
    return np.asarray(token_bits(keys, jnp.arange(num_tokens, dtype=jnp.int32)[None, :]))


def chi_square_is_fine(counts, expected):
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = counts.size - 1
    return abs(statistic - freedom) < 7 * np.sqrt(2 * freedom)


BITS = bits_of(keys_at(np.arange(256)), 4096)


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_every_byte_is_uniform(shift):
    counts = np.bincount(((BITS >> shift) & 255).ravel(), minlength=256)
    assert chi_square_is_fine(counts, BITS.size / 256)


@pytest.mark.parametrize("shift", [0, 12, 28])
@pytest.mark.parametrize(
    "neighbour",
    [(0, 1), (0, 2), (0, 64), (0, 1024), (1, 0), (2, 0), (128, 0), (1, 1), (1, -1)],
    ids=lambda d: f"position{d[0]:+d} token{d[1]:+d}",
)
def test_pairs_are_independent(neighbour, shift):
    a, b = BITS, np.roll(BITS, (-neighbour[0], -neighbour[1]), (0, 1))
    pair = (((a >> shift) & 15) << 4) | ((b >> shift) & 15)
    assert chi_square_is_fine(np.bincount(pair.ravel(), minlength=256), BITS.size / 256)


def test_every_bit_depends_on_every_bit_of_the_token_and_of_both_key_halves():
    generator = np.random.default_rng(0)
    keys = generator.integers(0, 2**32, (4096, 2), np.uint32)
    tokens = generator.integers(0, 2**17, (4096, 1), np.int32)
    base = np.asarray(token_bits(jnp.asarray(keys), jnp.asarray(tokens)))
    for bit in range(32):
        changes = []
        for half in (0, 1):
            other = keys.copy()
            other[:, half] ^= np.uint32(1 << bit)
            changes.append(token_bits(jnp.asarray(other), jnp.asarray(tokens)))
        if bit < 17:
            changes.append(token_bits(jnp.asarray(keys), jnp.asarray(tokens ^ (1 << bit))))
        for changed in changes:
            flipped = np.unpackbits((np.asarray(changed) ^ base).view(np.uint8), bitorder="little").reshape(4096, 32)
            # 4,096 fair coins: seven standard deviations are 0.055, and the mixer's own bias is below 0.01.
            assert np.abs(flipped.mean(axis=0) - 0.5).max() < 0.07


def test_gumbel_follows_its_distribution():
    noise = np.asarray(gumbel(keys_at(np.arange(64)), jnp.arange(16384, dtype=jnp.int32)[None, :])).ravel()
    assert np.isfinite(noise).all()
    uniform = np.sort(np.exp(-np.exp(-noise.astype(np.float64))))
    n = uniform.size
    distance = np.abs(uniform - (np.arange(n) + 0.5) / n).max()
    assert distance < 3 / np.sqrt(n)
    assert abs(noise.mean() - 0.5772157) < 7 * 1.2825 / np.sqrt(n)
    # The upper tail decides which token wins: P(G > 10) = 4.54e-5.
    assert abs((noise > 10).sum() - n * 4.54e-5) < 7 * np.sqrt(n * 4.54e-5)


def test_gumbel_agrees_with_float64_logarithms():
    keys = keys_at(np.arange(64))
    tokens = jnp.arange(16384, dtype=jnp.int32)[None, :]
    bits = np.asarray(token_bits(keys, tokens)).astype(np.float64)
    w = np.minimum(((np.floor(bits / 2).astype(np.float32) + np.float32(0.5)) * 2.0**-31), 1 - 2.0**-24)
    np.testing.assert_allclose(np.asarray(gumbel(keys, tokens)), -np.log(-np.log1p(-w)), atol=3e-6, rtol=1e-6)


def test_a_key_is_its_seed_sample_and_position():
    base = np.asarray(keys_at([5]))
    for other in (
        keys_at([6]),
        keys_at([5], sample_index=1),
        keys_at([5], seed=(1, 1)),
        keys_at([5], seed=(0, 2)),
        keys_at([5], seed=(1, 0)),
    ):
        assert not np.array_equal(base, np.asarray(other))
    assert np.array_equal(base, np.asarray(keys_at([4, 5]))[1:])
