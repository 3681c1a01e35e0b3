"""One picker for the backends of every op: by device and needs, with the reason when one cannot serve."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pagedjax_kernels.hardware import Hardware, current_hardware

logger = logging.getLogger("pagedjax_kernels")

_logged: set[tuple] = set()


class Backend(NamedTuple):
    """One implementation of an op.

    Attributes:
      name: what callers pass as `backend=`.
      why_not: (hardware, case) -> the reason why it cannot serve this call, or None if it can. `case` is the op's own
        description of the call (dtypes, head counts, features), made of static facts only.
      run: the implementation.
      automatic: False keeps it out of `backend="auto"` (the reference: right, but slow).
    """

    name: str
    why_not: Callable[[Hardware, Any], str | None]
    run: Callable[..., Any]
    automatic: bool = True


def pick(op: str, backends: Sequence[Backend], requested: str, case: Any) -> Backend:
    """Chooses the backend of one call.

    Args:
      op: the op's name, for messages.
      backends: best first.
      requested: a backend's name (it serves or fails; it never falls back), or "auto" (the first that can serve;
        which one and why is logged once).
      case: static facts about the call.

    Raises:
      ValueError: no backend of that name.
      NotImplementedError: the named one cannot serve, or none can; says why.
    """
    names = [b.name for b in backends]
    hardware = current_hardware()
    if requested != "auto":
        if requested not in names:
            raise ValueError(f"{op}: backend must be 'auto' or one of {', '.join(names)}; got {requested!r}")
        backend = backends[names.index(requested)]
        reason = backend.why_not(hardware, case)
        if reason is not None:
            raise NotImplementedError(
                f"{op}: backend {requested!r} cannot serve this call on {hardware.kind}: {reason}"
            )
        return backend
    reasons: list[str] = []
    for backend in backends:
        if not backend.automatic:
            continue
        reason = backend.why_not(hardware, case)
        if reason is None:
            _log_once(op, backend.name, hardware, tuple(reasons))
            return backend
        reasons.append(f"{backend.name}: {reason}")
    raise NotImplementedError(f"{op}: no backend can serve this call on {hardware.kind} ({'; '.join(reasons)})")


def _log_once(op: str, name: str, hardware: Hardware, reasons: tuple[str, ...]) -> None:
    key = (op, name, hardware, reasons)
    if key in _logged:
        return
    _logged.add(key)
    because = f" ({'; '.join(reasons)})" if reasons else " (first choice)"
    logger.info("%s: backend %s on %s%s", op, name, hardware.kind, because)
