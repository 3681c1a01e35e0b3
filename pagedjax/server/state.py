"""What every request handler needs, made once by `app.create_app`."""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pagedjax.server.metrics import Metrics
from pagedjax.server.vocabulary import Vocabulary


@dataclasses.dataclass
class ServerState:
    """The server's state.

    Attributes:
      engine: an `AsyncEngine`.
      metrics: what /metrics shows.
      vocabulary: text and bytes of single tokens.
      tokenizing: threads for the tokenizer, so that a long prompt does not hold up everybody's streams.
      draining: set once the server is asked to stop; new work is refused from then on.
      started: Unix time, seconds.
    """

    engine: Any
    metrics: Metrics
    vocabulary: Vocabulary
    tokenizing: ThreadPoolExecutor = dataclasses.field(
        default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="tokenizer")
    )
    draining: bool = False
    started: int = dataclasses.field(default_factory=lambda: int(time.time()))
