"""`AsyncEngine`: an `Engine` in a thread of its own, for one asyncio event loop."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

from pagedjax.config import Config
from pagedjax.engine.engine import Engine
from pagedjax.engine.stats import EngineStats
from pagedjax.errors import EngineDeadError, PagedJaxError
from pagedjax.types import Request, RequestOutput

logger = logging.getLogger("pagedjax")

STATS_SECONDS = 0.5
"""Page counts are read from the device at most this often while the engine is busy, and whenever it becomes idle."""
MAX_BUFFERED = 4096
"""Deltas that a stream may hold for a client that does not read; one more aborts the request."""


class _Stream:
    """The deltas of one request on their way to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.opened = time.monotonic()
        self.queue: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()

    def put(self, item: RequestOutput | Exception) -> None:
        """From the engine's thread."""
        # A loop that is closed has nobody left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.queue.put_nowait, item)


class AsyncEngine:
    """Coroutines on one event loop; the engine runs in its own thread and is touched by no other.

    Attributes of the engine that never change can be read from here.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        engine.interactive = True
        self.tokenizer: Any = engine.tokenizer
        self.loaded = engine.loaded
        self.model_name: str = engine.model_name
        self.max_model_len: int = engine.max_model_len
        self.vocab_size: int = engine.vocab_size
        self.num_usable_pages: int = engine.num_usable_pages
        self.config: Config = engine.config
        self.secret: bytes = engine.runner.secret()
        self._wake = threading.Condition()
        self._inbox: collections.deque[tuple[str, Any]] = collections.deque()
        self._streams: dict[str, _Stream] = {}
        self._draining = False
        self._stopping = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._stats, self._stats_at = engine.stats(), 0.0
        self._idle = threading.Event()
        self._idle.set()

    # The event loop's side

    async def start(self) -> None:
        """Start the engine's thread."""
        self._thread = threading.Thread(target=self._run, name="pagedjax-engine", daemon=True)
        self._thread.start()

    async def shutdown(self, drain_seconds: float) -> None:
        """Refuse new requests, let running ones finish for at most drain_seconds, abort the rest, stop the thread."""
        self._draining = True
        deadline = time.monotonic() + drain_seconds
        while self.is_alive and not self._idle.is_set() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._post("stop", None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 30.0)

    async def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        """Deltas of one request. Closing the iterator early aborts the request and frees its pages.

        Raises:
          InvalidRequestError, QueueFullError: on the first iteration.
          EngineDeadError: the engine has stopped or is draining.
        """
        if self._draining or not self.is_alive:
            raise EngineDeadError("the server is shutting down" if self._draining else "the engine has stopped")
        stream = _Stream(asyncio.get_running_loop())
        self._post("add", (request, stream))
        finished = False
        try:
            while not finished:
                item = await stream.queue.get()
                if isinstance(item, Exception):
                    finished = True
                    raise item
                finished = item.finished
                yield item
        finally:
            if not finished:
                self._post("abort", request.request_id)

    async def abort(self, request_id: str) -> None:
        """End a request; its stream closes with finish reason `abort`."""
        self._post("abort", request_id)

    def save(self, folder: str) -> None:
        """Write a snapshot of the prefix cache, after `shutdown`.

        Raises:
          EngineDeadError: the engine died of an error, or has not come to its end.
          SnapshotError, OSError: see `Engine.save`.
        """
        if self._error is not None or self.is_alive:
            raise EngineDeadError("only an engine that was shut down can be saved")
        self._engine.save(folder)

    def stats(self) -> EngineStats:
        """The latest numbers; at most half a second old while busy."""
        return self._stats

    @property
    def is_alive(self) -> bool:
        return self._error is None and self._thread is not None and self._thread.is_alive()

    def _post(self, kind: str, payload: Any) -> None:
        with self._wake:
            self._idle.clear()
            self._inbox.append((kind, payload))
            self._wake.notify()

    # The engine's side

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wait_for_work()
                self._read_inbox()
                for output in self._engine.step() if self._engine.has_unfinished() else ():
                    self._send(output)
                self._refresh_stats()
            self._abort_all(EngineDeadError("the server is shutting down"))
        except BaseException as error:
            logger.exception("the engine stopped")
            self._error = error
            self._abort_all(EngineDeadError("the engine has stopped after an internal error"))
        finally:
            self._idle.set()

    def _wait_for_work(self) -> None:
        with self._wake:
            while not self._inbox and not self._engine.has_unfinished():
                self._idle.set()
                self._wake.wait()

    def _read_inbox(self) -> None:
        while self._inbox:
            kind, payload = self._inbox.popleft()
            if kind == "stop":
                self._stopping = True
            elif kind == "abort":
                self._engine.abort(payload)
                if (stream := self._streams.pop(payload, None)) is not None:
                    stream.put(EngineDeadError("the request was aborted"))
            else:
                self._add(*payload)

    def _add(self, request: Request, stream: _Stream) -> None:
        try:
            self._engine.add_request(request, arrived=stream.opened)
            self._streams[request.request_id] = stream
        except Exception as error:
            # A request that cannot even be looked at is that request's trouble, not everybody's.
            if not isinstance(error, PagedJaxError):
                logger.exception("request %s could not be added", request.request_id)
            stream.put(error)

    def _send(self, output: RequestOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            return
        if stream.queue.qsize() > MAX_BUFFERED:
            logger.warning("request %s: the client does not read; aborted", output.request_id)
            self._engine.abort(output.request_id)
            self._streams.pop(output.request_id)
            stream.put(EngineDeadError("the client reads too slowly"))
            return
        stream.put(output)
        if output.finished:
            del self._streams[output.request_id]

    def _refresh_stats(self) -> None:
        now = time.monotonic()
        if not self._engine.has_unfinished() or now - self._stats_at > STATS_SECONDS:
            self._stats, self._stats_at = self._engine.stats(), now

    def _abort_all(self, error: Exception) -> None:
        for stream in self._streams.values():
            stream.put(error)
        self._streams.clear()
        while self._inbox:
            kind, payload = self._inbox.popleft()
            if kind == "add":
                payload[1].put(error)
        for request_id in list(self._engine.request_ids):
            # After an internal error the device state may be gone; there is nothing to give back to then.
            if self._error is None:
                self._engine.abort(request_id)
        if self._error is None:
            self._stats = self._engine.stats()
