"""Bounds on what a client may send, held while it is being read."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedjax.server.errors import ApiError

_MAX_HEADERS = 256


class Limits:
    """ASGI middleware: a head of at most `max_head_bytes`, then the whole body, at most `max_bytes` of it.

    431 for the head. 413 as soon as Content-Length or the bytes that came exceed the limit, 408 when the client sends
    nothing for `seconds`. The connection is closed then: the rest of the body would be taken for the next request.
    """

    def __init__(self, app: ASGIApp, *, max_head_bytes: int, max_bytes: int, seconds: float):
        self.app = app
        self.max_head_bytes = max_head_bytes
        self.max_bytes = max_bytes
        self.seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
        except ApiError as error:
            error.headers["Connection"] = "close"
            await error.response()(scope, receive, send)
            return
        if body is None:  # the client went away in the middle
            return
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        await self.app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body, or None if the client went away."""
        head = len(scope.get("raw_path", b"")) + len(scope["query_string"])
        head += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        # The parser's own bound is on a head that is incomplete, so one that comes in a single piece passes it.
        if head > self.max_head_bytes or len(scope["headers"]) > _MAX_HEADERS:
            raise ApiError(431, f"the request's head is larger than {self.max_head_bytes} bytes", code="head_too_large")
        for name, value in scope["headers"]:
            if name.lower() == b"content-length" and value.isdigit() and int(value[:20]) > self.max_bytes:
                raise self._too_large()
        body = bytearray()
        while True:
            try:
                async with asyncio.timeout(self.seconds):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, f"no data for {self.seconds:g} seconds", code="request_timeout") from None
            if message["type"] != "http.request":
                return None
            body += message.get("body", b"")
            if len(body) > self.max_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                return bytes(body)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.max_bytes} bytes", code="body_too_large")
