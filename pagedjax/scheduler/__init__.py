"""Host-side scheduling over integers: who is admitted, who runs, who yields. Never touches a device array."""

from pagedjax.scheduler.scheduler import Plan, Scheduler
from pagedjax.scheduler.sequence import Phase, Sequence

__all__ = ["Phase", "Plan", "Scheduler", "Sequence"]
