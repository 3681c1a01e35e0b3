"""The outermost layer: a request id, a log line without content, and no exception that leaves without an answer."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedjax.server.errors import as_api_error
from pagedjax.server.metrics import Metrics

logger = logging.getLogger(__name__)
_POLLED = ("/health", "/metrics")
_CLIENT_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class Guard:
    """ASGI middleware. Puts the client's X-Request-Id, where it is plain, or a fresh one, into the scope."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.monotonic(), 0
        request_id = _request_id(scope)
        scope["pagedjax.request_id"] = request_id

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self.app(scope, receive, tagged)
        except Exception as error:
            answer = as_api_error(error, request_id)
            if status:  # too late for another status: breaking the connection tells the client
                raise
            await answer.response()(scope, receive, tagged)
        finally:
            self.metrics.count_http(scope, status)
            milliseconds = (time.monotonic() - started) * 1e3
            level = logging.DEBUG if scope["path"] in _POLLED else logging.INFO
            logger.log(
                level,
                "%s %r %s %.0f ms %s",
                scope["method"],
                scope["path"][:200],
                status or "gone",
                milliseconds,
                request_id,
            )


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name.lower() == b"x-request-id" and _CLIENT_ID.fullmatch(value):
            return value.decode()
    return uuid.uuid4().hex
