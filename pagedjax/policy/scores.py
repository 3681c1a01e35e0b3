"""Score functions: who goes first, and, read from the other end, who yields when pages run out.

A policy maps features to one f32 score per sequence; the lowest score goes first and equal scores go by arrival.
The functions use operators only, so that the scheduler calls them on the host (numbers or numpy arrays) and the
simulator inside a jitted step (jnp arrays).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

Score = float | np.floating | np.ndarray | jax.Array


class Features(NamedTuple):
    """What a policy may look at: numbers of one sequence, or arrays over sequences, all of one shape."""

    arrival: Any  # i32; rank in order of arrival, the smaller the earlier; kept through preemption
    priority: Any  # i32; lower is more urgent
    num_tokens: Any  # i32; tokens known so far, prompt and generated
    num_computed: Any  # i32; tokens of it whose keys and values are in pages


Policy = Callable[[Features], Score]


def first_come(features: Features) -> Score:
    """First come, first served; the youngest yields."""
    return _f32(features.arrival)


def by_priority(features: Features) -> Score:
    """The most urgent first; the least urgent yields, and of equally urgent ones the youngest."""
    return _f32(features.priority)


POLICIES: dict[str, Policy] = {"first_come": first_come, "priority": by_priority}
"""By the name that a configuration uses."""


def _f32(x: Any) -> Score:
    return x.astype(np.float32) if hasattr(x, "astype") else np.float32(x)
