"""The device side: compiled programs over one `EngineState`, padding to their shapes, the decode loop."""

from pagedjax.runner.buckets import Buckets, make_buckets
from pagedjax.runner.decode import Trap
from pagedjax.runner.messages import Flight, ForkedRow, LaneResult, NewRow, PublishedRow, Settlement
from pagedjax.runner.runner import Runner, enable_compilation_cache
from pagedjax.runner.state import EngineState, Rows, RowStatus
from pagedjax.runner.swapper import Swapper

__all__ = [
    "Buckets",
    "EngineState",
    "Flight",
    "ForkedRow",
    "LaneResult",
    "NewRow",
    "PublishedRow",
    "RowStatus",
    "Rows",
    "Runner",
    "Settlement",
    "Swapper",
    "Trap",
    "enable_compilation_cache",
    "make_buckets",
]
