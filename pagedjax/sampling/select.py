"""Choosing a token from adjusted logits: greedy, Gumbel-max over everything, or over what top-k, top-p and min-p keep.

All three limits keep a prefix of the tokens ordered by (logit descending, id ascending), applied in this order:

- top-k keeps the first k;
- top-p keeps a token while the tokens before it hold less than top_p of the mass that top-k kept;
- min-p keeps a token whose probability is at least min_p times the best one's.

So the kept set is a prefix too. Most of the time it ends within the first NUM_CANDIDATES tokens, and then these are
all that is looked at. Only the other lanes go through `_exact_tokens`, some at a time, without sorting: a bisection
over the bit patterns of the logits finds where the prefix ends.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.sampling.params import MIN_TEMPERATURE
from pagedjax.sampling.random import gumbel

NUM_CANDIDATES = 128
"""Tokens that `lax.top_k` takes per lane."""

EXACT_LANES = 4
"""Lanes that one round of the exact path serves: few enough for a CPU cache and for not computing much in vain."""


class Limits(NamedTuple):
    """What B lanes ask for."""

    temperature: jax.Array  # f32[B]
    top_k: jax.Array  # i32[B]; 0 keeps all
    top_p: jax.Array  # f32[B]
    min_p: jax.Array  # f32[B]

    @property
    def greedy(self) -> jax.Array:
        return self.temperature < MIN_TEMPERATURE

    @property
    def limited(self) -> jax.Array:
        return ~self.greedy & ((self.top_k > 0) | (self.top_p < 1.0) | (self.min_p > 0.0))


def argmax(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(max f32[B], lowest index that has it i32[B]); a row with a NaN gives V - 1.

    On CPUs XLA vectorises these two reductions, but not its own argmax (three times slower).
    """
    V = x.shape[1]
    best = jnp.max(x, axis=1)
    ids = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return best, jnp.min(jnp.where(x == best[:, None], ids, V - 1), axis=1)


def select(logits: jax.Array, limits: Limits, keys: jax.Array, *, num_candidates: int = NUM_CANDIDATES) -> jax.Array:
    """i32[B]: one token per lane from adjusted logits f32[B, V] and row keys u32[B, 2].

    Args:
      num_candidates: static; 0 sends every limited lane through the exact path (for tests).
    """
    best, tokens = argmax(logits)
    limited = limits.limited
    free = ~limits.greedy & ~limited

    def draw_free() -> jax.Array:
        scaled = _scaled(logits, best, limits.temperature)
        ids = jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :]
        return jnp.where(free, argmax(scaled + gumbel(keys, ids))[1], tokens)

    tokens = lax.cond(jnp.any(free), draw_free, lambda: tokens)

    def draw_limited() -> jax.Array:
        if num_candidates == 0:
            return _exact_tokens(logits, best, limits, keys, limited, tokens)
        drawn, enough = _candidate_tokens(logits, best, limits, keys, min(num_candidates, logits.shape[1]))
        drawn = jnp.where(limited & enough, drawn, tokens)
        return _exact_tokens(logits, best, limits, keys, limited & ~enough, drawn)

    return lax.cond(jnp.any(limited), draw_limited, lambda: tokens)


def _scaled(logits: jax.Array, best: jax.Array, temperature: jax.Array) -> jax.Array:
    """(logit - best) / temperature: at most 0, and exact near the best token however small the temperature is."""
    return (logits - best[:, None]) / jnp.maximum(temperature, MIN_TEMPERATURE)[:, None]


def _candidate_tokens(
    logits: jax.Array, best: jax.Array, limits: Limits, keys: jax.Array, K: int
) -> tuple[jax.Array, jax.Array]:
    """(tokens i32[B], enough bool[B]): a draw among the first K, and whether the kept prefix surely ends there."""
    V = logits.shape[1]
    values, ids = lax.top_k(logits, K)
    ids = ids.astype(jnp.int32)
    scaled = _scaled(values, best, limits.temperature)
    place = jnp.arange(K, dtype=jnp.int32)[None, :]
    few = (limits.top_k > 0) & (limits.top_k <= K)
    many = limits.top_k > K
    keep = (place < limits.top_k[:, None]) | ~few[:, None]
    mass = jnp.where(keep, jnp.exp(scaled), 0.0)
    nucleus = limits.top_p < 1.0

    def total_mass() -> jax.Array:
        return jnp.sum(jnp.exp(_scaled(logits, best, limits.temperature)), axis=1)

    total = lax.cond(jnp.any(limits.limited & nucleus & ~few), total_mass, lambda: jnp.zeros_like(best))
    total = jnp.where(few, jnp.sum(mass, axis=1), total)
    before = jnp.pad(jnp.cumsum(mass, axis=1)[:, :-1], ((0, 0), (1, 0)))
    keep &= ~nucleus[:, None] | (before < (limits.top_p * total)[:, None])
    keep &= scaled >= jnp.log(limits.min_p)[:, None]
    # With top-k beyond K the mass that top-p is a share of is unknown, so that top-p proves nothing.
    ends = ~keep[:, -1] & ~(many & nucleus)
    enough = few | ends if K < V else jnp.ones_like(few)
    # The first token stays whatever happens: a NaN must not leave a row without candidates.
    perturbed = jnp.where(keep | (place == 0), scaled + gumbel(keys, ids), -jnp.inf)
    chosen = argmax(perturbed)[1]
    return jnp.take_along_axis(ids, chosen[:, None], axis=1)[:, 0], enough


def _exact_tokens(
    logits: jax.Array, best: jax.Array, limits: Limits, keys: jax.Array, wanted: jax.Array, tokens: jax.Array
) -> jax.Array:
    """`tokens` with a draw over the whole vocabulary for the lanes wanted bool[B], EXACT_LANES at a time."""
    B = logits.shape[0]
    C = min(B, EXACT_LANES)
    order = jnp.argsort(~wanted, stable=True).astype(jnp.int32)
    order = jnp.where(jnp.arange(B, dtype=jnp.int32) < jnp.sum(wanted, dtype=jnp.int32), order, B)
    order = jnp.pad(order, (0, -B % C), constant_values=B)

    def more(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        start, _ = carry
        return (start < order.size) & (order[jnp.minimum(start, order.size - 1)] < B)

    def serve(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start, tokens = carry
        lanes = lax.dynamic_slice(order, (start,), (C,))
        pick = lambda x: x.at[lanes].get(mode="clip")  # noqa: E731
        drawn = _draw_exact(pick(logits), pick(best), Limits(*map(pick, limits)), pick(keys))
        return start + C, tokens.at[lanes].set(drawn, mode="drop")

    return lax.while_loop(more, serve, (jnp.int32(0), tokens))[1]


def _draw_exact(logits: jax.Array, best: jax.Array, limits: Limits, keys: jax.Array) -> jax.Array:
    """i32[C]: a draw among all tokens that the limits keep."""
    order = _sortable(logits)
    scaled = _scaled(logits, best, limits.temperature)
    ones = jnp.ones_like(scaled)
    most = jnp.where(limits.top_k > 0, limits.top_k.astype(jnp.float32), jnp.inf)
    everything = jnp.ones(logits.shape, bool)
    keep = lax.cond(jnp.any(limits.top_k > 0), lambda: _prefix(order, ones, most), lambda: everything)
    mass = jnp.where(keep, jnp.exp(scaled), 0.0)
    share = jnp.where(limits.top_p < 1.0, limits.top_p * jnp.sum(mass, axis=1), jnp.inf)
    keep &= lax.cond(jnp.any(limits.top_p < 1.0), lambda: _prefix(order, mass, share), lambda: everything)
    keep &= scaled >= jnp.log(limits.min_p)[:, None]
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :]
    return argmax(jnp.where(keep, scaled + gumbel(keys, ids), -jnp.inf))[1]


def _sortable(x: jax.Array) -> jax.Array:
    """u32, ordered as the float32 values are, and -0 before 0 as `lax.top_k` has it."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _prefix(order: jax.Array, weight: jax.Array, limit: jax.Array) -> jax.Array:
    """bool[C, V]: the tokens before which, by (order descending, id ascending), less than `limit` of weight lies.

    Args:
      order: u32[C, V].
      weight: f32[C, V], not negative.
      limit: f32[C], above 0; infinite keeps all.
    """
    V = order.shape[1]

    def weight_above(threshold: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(order > threshold[:, None], weight, 0.0), axis=1)

    def lower(i: jax.Array, threshold: jax.Array) -> jax.Array:
        # Clears one bit after the other, from the highest, as long as the weight above stays below the limit.
        candidate = threshold - (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(weight_above(candidate) < limit, candidate, threshold)

    threshold = lax.fori_loop(0, 32, lower, jnp.full(order.shape[:1], 0xFFFFFFFF, jnp.uint32))
    tied = order == threshold[:, None]
    num_tied = jnp.sum(tied, axis=1, dtype=jnp.int32)
    each = jnp.max(jnp.where(tied, weight, 0.0), axis=1)
    room = jnp.ceil((limit - weight_above(threshold)) / jnp.maximum(each, jnp.finfo(jnp.float32).tiny))
    num_kept = jnp.clip(room, 1, V).astype(jnp.int32)
    ids = lax.broadcasted_iota(jnp.int32, order.shape, 1)

    def shrink(i: jax.Array, last: jax.Array) -> jax.Array:
        # The lowest `last` such that num_kept tied tokens have an id of at most `last`, bit by bit.
        candidate = last - (jnp.int32(1 << (V.bit_length() - 1)) >> i)
        count = jnp.sum(tied & (ids <= candidate[:, None]), axis=1, dtype=jnp.int32)
        return jnp.where(count >= num_kept, candidate, last)

    last = jnp.full(order.shape[:1], (1 << V.bit_length()) - 1, jnp.int32)
    last = lax.cond(jnp.any(num_tied > num_kept), lambda: lax.fori_loop(0, V.bit_length(), shrink, last), lambda: last)
    last = jnp.where(num_tied > num_kept, last, V)
    return (order > threshold[:, None]) | (tied & (ids <= last[:, None]))
