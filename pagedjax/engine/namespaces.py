"""Prefix-cache namespaces: one number a salt, so that prompts under different salts share no page."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

MAX_SALTS = 65_536
"""Salts remembered. A salt that was forgotten gets a new number when it comes again: it misses, it never mixes."""


class Namespaces:
    """Numbers for salts; the least recently used salt is forgotten, and no number is given out twice."""

    def __init__(self, max_salts: int = MAX_SALTS) -> None:
        self._max_salts = max_salts
        self._ids: collections.OrderedDict[str, int] = collections.OrderedDict()
        self._next = 0

    def record(self) -> dict[str, Any]:
        """All that is remembered, as JSON values."""
        return {"next": self._next, "ids": list(self._ids.items())}

    def load(self, record: Mapping[str, Any]) -> None:
        """Go on from a `record`."""
        self._next, self._ids = record["next"], collections.OrderedDict((salt, i) for salt, i in record["ids"])

    def of(self, salt: str) -> int:
        """The namespace of a salt."""
        if salt in self._ids:
            self._ids.move_to_end(salt)
            return self._ids[salt]
        self._ids[salt] = self._next
        self._next += 1
        if len(self._ids) > self._max_salts:
            self._ids.popitem(last=False)
        return self._ids[salt]
