"""What something costs here and now, from having done it."""

from __future__ import annotations

KEPT = 0.8
"""Weight of what was known before, against a new measurement."""


class Rate:
    """Seconds per unit, recent measurements counting more and large ones in proportion."""

    def __init__(self) -> None:
        self._seconds = self._units = 0.0

    def add(self, seconds: float, units: int) -> None:
        """`units` took `seconds`."""
        self._seconds = KEPT * self._seconds + seconds
        self._units = KEPT * self._units + units

    @property
    def value(self) -> float | None:
        """None before anything was measured."""
        return self._seconds / self._units if self._units else None
