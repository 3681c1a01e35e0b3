"""The engine: requests in, tokens out.

`Engine` is the synchronous core, `AsyncEngine` serves an event loop, `LLM` is for offline work.
"""

from pagedjax.engine.async_engine import AsyncEngine
from pagedjax.engine.build import build_engine, from_loaded, restore_engine
from pagedjax.engine.differences import Difference, diff_states
from pagedjax.engine.engine import Engine
from pagedjax.engine.llm import LLM
from pagedjax.engine.snapshot import load_engine, save_engine
from pagedjax.engine.stats import EngineStats
from pagedjax.engine.trace import TraceRecorder, replay_trace

__all__ = [
    "LLM",
    "AsyncEngine",
    "Difference",
    "Engine",
    "EngineStats",
    "TraceRecorder",
    "build_engine",
    "diff_states",
    "from_loaded",
    "load_engine",
    "replay_trace",
    "restore_engine",
    "save_engine",
]
