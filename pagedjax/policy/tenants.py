"""Virtual token counters: how much each tenant was served, for policies that share between tenants.

The counters are those of Sheng et al. 2024, "Fairness in Serving Large Language Models" (arXiv 2401.00588). A
tenant's counter grows by the prompt tokens computed for it and the tokens generated for it, weighted by their cost. A
tenant that had nothing waiting is lifted to the least served of those that have, so that idle time is not saved up.
Between tenants that always have something waiting the counters then differ by no more than one large prompt, or what all
rows generate for one of them between two admissions.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
"""Costs of a token, as in the paper: a generated one takes a step of its own, a prompt is computed many at a time."""
MAX_TENANTS = 65_536
"""Tenants remembered. One that was forgotten, and comes again, begins as a new one does: at the least served."""


class Tenants:
    """The counters; a tenant is a name. Not thread-safe."""

    def __init__(self, max_tenants: int = MAX_TENANTS) -> None:
        self._max_tenants = max_tenants
        self._served: dict[str, float] = {}  # least recently joined first
        self._waiting: collections.Counter[str] = collections.Counter()
        self._last = ""  # of those that had something waiting, the last to run out of it

    def served(self, tenant: str) -> float:
        """Weighted tokens that it was served, as far as was not lost in idle time."""
        return self._served.get(tenant, 0.0)

    def join(self, tenant: str, *, is_new: bool = True) -> None:
        """A sequence of the tenant begins to wait; `is_new` unless it ran before and was preempted."""
        served = self._served.pop(tenant, 0.0)
        if is_new and not self._waiting[tenant]:
            # Where nobody waits, whoever did last says how far the service has come.
            served = max(served, min((self._served[other] for other in self._waiting), default=self.served(self._last)))
        self._served[tenant] = served
        self._waiting[tenant] += 1
        if len(self._served) > self._max_tenants:
            idle = next((name for name in self._served if name not in self._waiting), None)
            if idle is not None:
                del self._served[idle]

    def leave(self, tenant: str) -> None:
        """A sequence of the tenant waits no longer: it runs, or it ended."""
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
            self._last = tenant

    def record(self) -> dict[str, Any]:
        """The counters as JSON values."""
        return {"served": dict(self._served), "waiting": dict(self._waiting), "last": self._last}

    def load(self, record: Mapping[str, Any]) -> None:
        """Go on from a `record`."""
        self._served, self._last = dict(record["served"]), record["last"]
        self._waiting = collections.Counter(record["waiting"])

    def charge(self, tenant: str, *, prompt: int = 0, output: int = 0) -> None:
        """The tenant was served so many tokens."""
        self._served[tenant] = self.served(tenant) + PROMPT_WEIGHT * prompt + OUTPUT_WEIGHT * output

    def tags(self, tenants: Sequence[str], arrival: np.ndarray, prompts: np.ndarray) -> np.ndarray:
        """What each waiting sequence's tenant will have been served when its turn comes: f64[C].

        That is the tenant's counter and the prompts of its sequences before this one. Taking sequences by this tag is
        taking, again and again, the oldest of the least served tenant.

        Args:
          tenants: of each sequence.
          arrival: i32[C] ranks.
          prompts: i32[C] tokens that will be charged for each when it is admitted.
        """
        number: dict[str, int] = {}
        of = np.fromiter((number.setdefault(t, len(number)) for t in tenants), np.int64, len(tenants))
        counters = np.asarray([self.served(t) for t in number], np.float64)
        order = np.lexsort((arrival, of))
        cost = PROMPT_WEIGHT * prompts[order].astype(np.float64)
        before = np.cumsum(cost) - cost
        first = np.searchsorted(of[order], np.arange(len(number)))
        out = np.empty(len(tenants), np.float64)
        out[order] = counters[of[order]] + before - before[first][of[order]]
        return out
