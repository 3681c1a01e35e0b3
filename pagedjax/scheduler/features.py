"""The features of queued or running sequences, each computed when a policy asks for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from pagedjax.policy import Tenants
from pagedjax.scheduler.prefixes import KnownPrefixes
from pagedjax.scheduler.sequence import Sequence


class SequenceFeatures:
    """`pagedjax.policy.Features` of some sequences, numpy arrays [C] in their order. A policy pays for what it reads.

    Args:
      sequences: those to be compared.
      tenants: what each tenant was served.
      known: what the prefix cache is expected to have; None where there is no prefix cache.
      now: on the clock of `Sequence.arrived`, seconds.
    """

    def __init__(self, sequences: Seq[Sequence], tenants: Tenants, known: KnownPrefixes | None, now: float) -> None:
        self._sequences, self._tenants, self._known, self._now = sequences, tenants, known, now

    def _column(self, of: Callable[[Sequence], Any], dtype: type) -> np.ndarray:
        return np.fromiter(map(of, self._sequences), dtype, len(self._sequences))

    @functools.cached_property
    def _ranks(self) -> np.ndarray:
        return self._column(lambda s: s.rank, np.int64)

    @functools.cached_property
    def _runs(self) -> np.ndarray:
        return self._column(lambda s: s.row is not None, np.bool_)

    @functools.cached_property
    def arrival(self) -> np.ndarray:
        """From the oldest of them on, so that float32 holds it exactly however long the engine runs."""
        return (self._ranks - self._ranks.min(initial=np.iinfo(np.int64).max)).astype(np.int32)

    @functools.cached_property
    def priority(self) -> np.ndarray:
        return self._column(lambda s: s.request.priority, np.int32)

    @functools.cached_property
    def num_tokens(self) -> np.ndarray:
        return self._column(lambda s: s.num_tokens, np.int32)

    @functools.cached_property
    def num_computed(self) -> np.ndarray:
        return self._column(lambda s: s.num_computed, np.int32)

    @functools.cached_property
    def num_cached(self) -> np.ndarray:
        size = len(self._sequences)
        if self._known is None or all(s.row is not None for s in self._sequences):
            return np.zeros(size, np.int32)
        hits = np.fromiter(self._known.hits(self._sequences), np.int32, size)
        return np.where(self._runs, 0, hits)

    @functools.cached_property
    def max_tokens(self) -> np.ndarray:
        return self._column(lambda s: s.max_total, np.int32)

    @functools.cached_property
    def service(self) -> np.ndarray:
        """From the least of them on, so that float32 loses little.

        A running sequence keeps what its tenant had been served when it got its row. Otherwise two running tenants would
        take turns at being the one that was served more, and take each other's pages.
        """
        prompts = self._column(_prompt_to_charge, np.int32) - self.num_cached
        names = [s.request.tenant for s in self._sequences]
        waiting = self._tenants.tags(names, self._ranks, np.maximum(prompts, 0))
        tags = np.where(self._runs, self._column(lambda s: s.service, np.float64), waiting)
        return (tags - tags.min(initial=np.inf)).astype(np.float32)

    @functools.cached_property
    def waited(self) -> np.ndarray:
        return (self._now - self._column(lambda s: s.arrived, np.float64)).astype(np.float32)

    @functools.cached_property
    def time_left(self) -> np.ndarray:
        return (self._column(lambda s: s.deadline_at, np.float64) - self._now).astype(np.float32)


def _prompt_to_charge(s: Sequence) -> int:
    """Prompt tokens that its tenant will be charged for: not what was charged before, nor what a fork takes over."""
    return 0 if s.is_charged or (s.parent is not None and s.waits_for_fork) else s.num_tokens
