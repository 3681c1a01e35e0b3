"""Runs the application: the socket, slow clients, signals, the engine's death."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from pagedjax.config import ServerConfig
from pagedjax.errors import ConfigError

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_FLUSH_SECONDS = 5  # for answers that are complete but not yet with their clients
_DEAD_SECONDS = 1  # between the engine's death and the end: clients get their 503


def bind(config: ServerConfig) -> socket.socket:
    """A bound socket that does not listen yet: the port is certain before minutes of loading, and nobody hangs on it.

    Raises:
      ConfigError: the address or the port cannot be had.
    """
    where = f"{config.host or '*'}:{config.port}"
    try:
        found = socket.getaddrinfo(config.host or None, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as e:
        raise ConfigError(f"config.server.port: cannot listen on {where}: {e.strerror or e}") from None
    return bound


def url_of(bound: socket.socket) -> str:
    """The address as a client on this machine would write it."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"


def _protocol(head_seconds: float) -> type[H11Protocol]:
    """HTTP/1.1 that closes a connection whose request head does not arrive in time."""

    class TimedProtocol(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._watch_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _watch_head(self) -> None:
            if self.conn.their_state is not h11.IDLE:
                self._stop_timer()
            elif self._timer is None:  # not restarted by each byte
                self._timer = self.loop.call_later(head_seconds, self.transport.close)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return TimedProtocol


class DrainingServer(uvicorn.Server):
    """On the first SIGTERM or SIGINT new work is refused and what runs may end; a second one aborts it, a third does
    not even tell the clients.

    The listener stays open meanwhile, so that /health answers 503 and late requests get a proper answer.
    """

    def __init__(self, app: FastAPI, config: ServerConfig, on_ready: Callable[[], None]):
        super().__init__(
            uvicorn.Config(
                app,
                http=_protocol(config.receive_seconds),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                h11_max_incomplete_event_size=config.max_header_bytes,
                timeout_graceful_shutdown=_FLUSH_SECONDS,
            )
        )
        self.app_state = app.state.server
        self.drain_seconds = config.drain_seconds
        self.engine_died = False
        self._on_ready = on_ready
        self._drain: asyncio.Task | None = None
        self._signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        del frame
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._on_signal, signal.Signals(sig).name)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        watch = asyncio.create_task(self._watch_engine())
        try:
            await super().serve(sockets)
        finally:
            watch.cancel()
            await self.app_state.engine.shutdown(0)

    def _on_signal(self, name: str) -> None:
        self._signals += 1
        if self._signals == 1:
            logger.warning("%s: finishing running requests, for %g seconds at most", name, self.drain_seconds)
            self.app_state.draining = True
            self._drain = asyncio.create_task(self._finish(self.drain_seconds))
        elif self._signals == 2:
            logger.warning("%s again: aborting running requests", name)
            assert self._drain is not None
            self._drain.cancel()
            self._drain = asyncio.create_task(self._finish(0))
        else:
            self.force_exit = self.should_exit = True

    async def _finish(self, seconds: float) -> None:
        await self.app_state.engine.shutdown(seconds)
        self.should_exit = True

    async def _watch_engine(self) -> None:
        """Ends the process some seconds after the engine did, so that whoever supervises it starts another."""
        engine = self.app_state.engine
        while engine.is_alive or self.app_state.draining:
            await asyncio.sleep(_POLL_SECONDS)
        self.engine_died = True
        logger.error("the engine has stopped; shutting down")
        await asyncio.sleep(_DEAD_SECONDS)
        self.should_exit = True


async def serve(app: FastAPI, bound: socket.socket, config: ServerConfig, on_ready: Callable[[], None]) -> int:
    """Serves until a signal or the engine's death; the process's exit status (1 after the latter).

    Args:
      app: from `create_app`, around a started engine, which is shut down at the end.
      bound: from `bind`.
      config: limits and times.
      on_ready: called once, when clients can connect.
    """
    server = DrainingServer(app, config, on_ready)
    await server.serve([bound])
    return 1 if server.engine_died else 0
