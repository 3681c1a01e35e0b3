"""Answers that end when the client goes away, streamed or whole."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagedjax.server.errors import ApiError, as_api_error
from pagedjax.server.rendering import to_json

T = TypeVar("T")
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientGoneError(Exception):
    """The client closed the connection before the answer was complete."""


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancels it and raises ClientGoneError as soon as the client disconnects."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for other in (task, watch):
            other.cancel()
        # Wait until the work has cleaned up after itself: its pages are given back by then.
        await asyncio.gather(task, watch, return_exceptions=True)


async def whole(request: HttpRequest, work: Coroutine[Any, Any, Response]) -> Response:
    """The response that `work` makes; nothing is sent to a client that has gone."""
    try:
        return await unless_gone(request.receive, work)
    except ClientGoneError:
        return Response(status_code=499)


class EventStream(Response):
    """Server-sent events: one JSON object each, `[DONE]` at the end.

    The status is sent with the first event, so a request that is refused gets its 400 or 429. An error later on is an
    event with an "error" and ends the stream without `[DONE]`.

    Args:
      events: the objects; closed in any case, which aborts what it still waits for.
      send_seconds: a client that takes nothing for so long is treated as gone.
      aliases: for error messages, engine's field name -> the client's.
    """

    def __init__(
        self,
        events: AsyncGenerator[dict[str, Any], None],
        send_seconds: float,
        aliases: Mapping[str, str] | None = None,
        on_error: Callable[[Exception], Exception] | None = None,
    ):
        super().__init__()
        self.events = events
        self.send_seconds = send_seconds
        self.aliases = aliases
        self.on_error = on_error or (lambda error: error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGoneError):
            await unless_gone(receive, self._pump(scope, receive, send))

    async def _pump(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def emit(data: bytes, more: bool = True) -> None:
            nonlocal started
            if not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            message = {"type": "http.response.body", "body": data, "more_body": more}
            try:
                # Not wait_for, which in Python 3.11 can swallow a cancellation: the client's leaving would go unseen.
                async with asyncio.timeout(self.send_seconds):
                    await send(message)
            except TimeoutError:
                raise ClientGoneError from None

        async with contextlib.aclosing(self.events):
            try:
                async for event in self.events:
                    await emit(b"data: " + to_json(event) + b"\n\n")
            except ClientGoneError:
                raise
            except Exception as error:
                answer = self._answer(error, scope)
                if not started:
                    await answer.response()(scope, receive, send)
                else:
                    await emit(b"data: " + to_json(answer.body()) + b"\n\n", more=False)
                return
            await emit(b"data: [DONE]\n\n", more=False)

    def _answer(self, error: Exception, scope: Scope) -> ApiError:
        return as_api_error(self.on_error(error), scope.get("pagedjax.request_id", ""), self.aliases)
