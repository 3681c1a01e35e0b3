"""The device side: compiled programs over one `EngineState`, padding to their shapes, the decode loop."""

from pagedjax.runner.buckets import Buckets, make_buckets
from pagedjax.runner.decode import Trap
from pagedjax.runner.runner import Flight, ForkedRow, LaneResult, NewRow, Runner, Settlement, enable_compilation_cache
from pagedjax.runner.state import EngineState, Rows, RowStatus

__all__ = [
    "Buckets",
    "EngineState",
    "Flight",
    "ForkedRow",
    "LaneResult",
    "NewRow",
    "RowStatus",
    "Rows",
    "Runner",
    "Settlement",
    "Trap",
    "enable_compilation_cache",
    "make_buckets",
]
