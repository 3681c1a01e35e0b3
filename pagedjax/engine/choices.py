"""Decisions that depend on the clock, in one place, so that a trace can record them and a replay can repeat them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T", int, bool)


class Choices:
    """Lets every decision stand, unless somebody listens.

    Attributes:
      hook: called with the name of what is decided and the decision; returns what is to be done.
    """

    def __init__(self) -> None:
        self.hook: Callable[[str, int], int] | None = None

    def make(self, name: str, value: T) -> T:
        """What was decided about `name`; returns what is to be done."""
        return value if self.hook is None else type(value)(self.hook(name, value))
