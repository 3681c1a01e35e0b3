"""Score functions: who goes first, and, read from the other end, who yields when pages run out.

A policy maps features to one f32 score per sequence; the lowest score goes first and equal scores go by arrival.
The functions use attributes and operators only, so that the scheduler calls them on the host (numpy arrays) and the
simulator inside a jitted step (jnp arrays). What a policy needs to know of the past is a feature that somebody else keeps
(see `tenants`), so that policies themselves have no state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from pagedjax.errors import ConfigError

Score = float | np.floating | np.ndarray | jax.Array

AGING_TOKENS = 16
"""What one later arrival is worth to a sequence under `shortest_prefix`, in prompt tokens."""


class Features(NamedTuple):
    """What a policy may look at: numbers of one sequence, or arrays over sequences, all of one shape.

    The sequences that are compared with one another are looked at together, at one time.
    """

    arrival: Any  # i32; rank in order of arrival, the smaller the earlier; kept through preemption
    priority: Any  # i32; lower is more urgent
    num_tokens: Any  # i32; tokens known so far, prompt and generated
    num_computed: Any  # i32; tokens of it whose keys and values are in pages; 0 while it waits
    num_cached: Any  # i32; tokens that the prefix cache is expected to have for it; 0 once it runs
    max_tokens: Any  # i32; tokens at which it ends at the latest, prompt included
    service: Any  # f32; weighted tokens that its tenant will have been served when its turn comes, see `tenants`
    waited: Any  # f32; seconds since it arrived
    time_left: Any  # f32; seconds to its deadline, infinite where it has none


Policy = Callable[[Features], Score]


def first_come(features: Features) -> Score:
    """First come, first served; the youngest yields."""
    return _f32(features.arrival)


def by_priority(features: Features) -> Score:
    """The most urgent first; the least urgent yields, and of equally urgent ones the youngest."""
    return _f32(features.priority)


def shortest_prefix(features: Features) -> Score:
    """The fewest prompt tokens left to compute first, what the prefix cache has left out.

    Nobody starves: each later arrival counts as AGING_TOKENS tokens, so that a sequence with r tokens to compute is
    overtaken by at most r / AGING_TOKENS of those that came after it.
    """
    left = features.num_tokens - features.num_computed - features.num_cached
    return _f32(left) + AGING_TOKENS * _f32(features.arrival)


def fair_share(features: Features) -> Score:
    """The tenant that was served least goes first: virtual token counters (Sheng et al. 2024, arXiv 2401.00588)."""
    return _f32(features.service)


def earliest_deadline(features: Features) -> Score:
    """The nearest deadline first, those without one last."""
    return _f32(features.time_left)


POLICIES: dict[str, Policy] = {
    "first_come": first_come,
    "priority": by_priority,
    "shortest_prefix": shortest_prefix,
    "fair_share": fair_share,
    "earliest_deadline": earliest_deadline,
}
"""By the name that `config.scheduler.policy` uses. Add your own before the engine is built."""


def policy_named(name: str) -> Policy:
    """The policy that a configuration names. ConfigError lists those there are."""
    if name not in POLICIES:
        raise ConfigError(f"config.scheduler.policy: must be one of {', '.join(POLICIES)}; got {name!r}")
    return POLICIES[name]


def _f32(x: Any) -> Score:
    return x.astype(np.float32) if hasattr(x, "astype") else np.float32(x)
