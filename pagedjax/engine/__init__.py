"""The engine: requests in, tokens out.

`Engine` is the synchronous core, `AsyncEngine` serves an event loop, `LLM` is for offline work.
"""

from pagedjax.engine.async_engine import AsyncEngine
from pagedjax.engine.build import build_engine, from_loaded
from pagedjax.engine.engine import Engine
from pagedjax.engine.llm import LLM
from pagedjax.engine.stats import EngineStats

__all__ = ["LLM", "AsyncEngine", "Engine", "EngineStats", "build_engine", "from_loaded"]
