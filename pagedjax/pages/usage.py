"""What the owned pages are used for: how much sharing saves, and which of their slots hold no token."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pagedjax.pages.state import NULL_PAGE, Pages, PageStats

Count = Any  # an i32 array inside programs, a number outside


class Usage(NamedTuple):
    """Of the pages that tables name, i32 each. A shared page counts once; tokens + reserved + internal = distinct x S."""

    mapped: Count  # table entries that name a page
    distinct: Count  # pages that they name
    tokens: Count  # slots that hold a token's keys and values
    reserved: Count  # empty slots that a row of the page may fill yet
    internal: Count  # empty slots that none of its rows can fill any more


def usage(pages: Pages, num_computed: jax.Array, limits: jax.Array) -> Usage:
    """Count entries, pages and slots. Reads everything, O(N + G R P): for reports, not for every step.

    What a slot of a shared page is goes by the row that has (or may have) most tokens in it.

    Args:
      pages: N x S below 2**31.
      num_computed: i32[R] tokens whose keys and values are in the row's pages.
      limits: i32[R] most tokens that the row can come to hold there.
    """
    N, S, P = pages.total_pages, pages.page_size, pages.max_pages_per_row
    entries = pages.table.reshape(-1)
    first_token = jnp.arange(P, dtype=jnp.int32) * S

    def slots_below(num_tokens: jax.Array) -> jax.Array:
        """i32[N] slots of each page that belong to the first num_tokens i32[R] tokens of a row."""
        slots = jnp.clip(num_tokens[:, None] - first_token[None, :], 0, S)
        slots = jnp.broadcast_to(slots[None], pages.table.shape).reshape(-1)
        return jnp.zeros(N, jnp.int32).at[entries].max(slots).at[NULL_PAGE].set(0)

    named = jnp.zeros(N, jnp.bool_).at[entries].set(True).at[NULL_PAGE].set(False)
    filled = slots_below(num_computed)
    fillable = jnp.maximum(slots_below(limits), filled)

    def total(values: jax.Array) -> jax.Array:
        return jnp.sum(values, dtype=jnp.int32)

    return Usage(
        mapped=total(entries != NULL_PAGE),
        distinct=total(named),
        tokens=total(filled),
        reserved=total(fillable - filled),
        internal=total(jnp.where(named, S - fillable, 0)),
    )


def sharing_ratio(counts: Usage) -> float:
    """Share of the mapped logical pages that sharing saves: (mapped - distinct) / mapped (Kwon et al. 2023, figure 15)."""
    return (counts.mapped - counts.distinct) / counts.mapped if counts.mapped else 0.0


def owned_shares(counts: Usage) -> dict[str, float]:
    """What the slots of the pages in tables are, as shares of them: they add up to 1, or are 0 where there are none.

    These are the parts of figure 2 in Kwon et al. 2023, as far as they can be known while a sequence runs: `reserved` goes
    by the longest that it may become.
    """
    slots = counts.tokens + counts.reserved + counts.internal
    return {name: getattr(counts, name) / max(slots, 1) for name in ("tokens", "reserved", "internal")}


def pool_shares(states: PageStats, counts: Usage, page_size: int) -> dict[str, float]:
    """What all slots of the pool are, as shares of it: they add up to 1.

    Beside `owned_shares`: `cached` and `free` pages, which can be handed out, `pending` ones, which a copy in flight
    holds, and `external`: pages of one size leave no gaps between them, so that this is the one reserved page.
    """
    slots = {name: getattr(counts, name) for name in ("tokens", "reserved", "internal")}
    slots |= {name: getattr(states, name) * page_size for name in ("cached", "free", "pending")}
    slots["external"] = page_size
    total = (sum(states) + 1) * page_size
    return {name: number / total for name, number in slots.items()}
