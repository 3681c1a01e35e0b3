"""Counts compilations, so that "none after warm-up" is a number and a test."""

from __future__ import annotations

import threading

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts the programs that XLA compiled (or loaded from the compilation cache) in this process since `start()`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def start(self) -> CompileCounter:
        """Begin to listen. JAX has no public way to take a listener off, so a counter lives as long as the process."""
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        return self

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs
        if event == _EVENT:
            with self._lock:
                self._count += 1

    @property
    def count(self) -> int:
        with self._lock:
            return self._count
