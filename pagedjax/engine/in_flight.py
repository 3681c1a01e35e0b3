"""The requests in flight, and what is drawn for each new one: ranks, namespaces, seeds."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np

from pagedjax.engine.beams import BeamGroup
from pagedjax.engine.group import Continuation, RequestGroup
from pagedjax.engine.namespaces import Namespaces
from pagedjax.scheduler import Sequence
from pagedjax.types import RequestOutput


class InFlight:
    """Groups by request id, continuations by sequence, and deadlines.

    Args:
      seed: of the seeds that requests without one get; 0: from the operating system.

    Attributes:
      next_rank: arrival order of the next sequence.
    """

    def __init__(self, seed: int) -> None:
        self.groups: dict[str, RequestGroup] = {}
        self.continuations: dict[Sequence, Continuation] = {}
        self.deadlines: dict[str, float] = {}
        self.namespaces = Namespaces()
        self.next_rank = 0
        self.seeds = np.random.default_rng(seed or secrets.randbits(64))

    def draw_seed(self) -> int:
        """A seed for a request; 63 bits."""
        return int(self.seeds.integers(2**63))

    def add(self, group: RequestGroup, arrived: float) -> None:
        """Take a request in that came at `arrived`, seconds on the scheduler's clock."""
        request = group.request
        self.next_rank += len(group.continuations)
        self.groups[request.request_id] = group
        if request.deadline is not None:
            self.deadlines[request.request_id] = arrived + request.deadline
        for continuation in group.continuations:
            self.continuations[continuation.sequence] = continuation
            continuation.sequence.arrived = arrived

    def forget(self, group: RequestGroup) -> None:
        """A request is over, and all of it reported."""
        for continuation in group.continuations:
            del self.continuations[continuation.sequence]
        del self.groups[group.request.request_id]
        self.deadlines.pop(group.request.request_id, None)

    def group_of(self, sequence: Sequence) -> RequestGroup:
        """The request that a sequence continues."""
        return self.groups[sequence.request.request_id]

    def beams_of(self, sequence: Sequence) -> BeamGroup | None:
        """The search that a sequence is a beam of, if it is one."""
        group = self.group_of(sequence)
        return group if isinstance(group, BeamGroup) else None

    def overdue(self, now: float) -> list[RequestGroup]:
        """Requests whose deadline has passed."""
        return [self.groups[request_id] for request_id, at in self.deadlines.items() if at <= now]

    def seconds_left(self, now: float) -> float:
        """Until the nearest deadline; infinite where there is none."""
        return min(self.deadlines.values(), default=float("inf")) - now

    def drain(self) -> list[RequestOutput]:
        """What is new of each request; those that are over are forgotten."""
        outputs = [out for group in self.groups.values() if (out := group.drain()) is not None]
        for out in outputs:
            if out.finished:
                self.forget(self.groups[out.request_id])
        return outputs

    # Snapshots

    def record(self) -> dict[str, Any]:
        """What is drawn for new requests, as JSON values."""
        return {
            "namespaces": self.namespaces.record(),
            "next_rank": self.next_rank,
            "seeds": self.seeds.bit_generator.state,
        }

    def load(self, record: Mapping[str, Any], groups: list[RequestGroup]) -> dict[int, Sequence]:
        """Go on from a `record`, with these requests; returns their sequences by rank. Deadlines: `load_deadlines`."""
        self.groups = {group.request.request_id: group for group in groups}
        self.continuations = {c.sequence: c for group in groups for c in group.continuations}
        self.namespaces.load(record["namespaces"])
        self.next_rank = record["next_rank"]
        self.seeds.bit_generator.state = record["seeds"]
        return {sequence.rank: sequence for sequence in self.continuations}

    def load_deadlines(self) -> None:
        """Take deadlines over from the sequences, once the scheduler has put them on its clock."""
        self.deadlines = {
            request_id: group.continuations[0].sequence.deadline_at
            for request_id, group in self.groups.items()
            if group.request.deadline is not None
        }
