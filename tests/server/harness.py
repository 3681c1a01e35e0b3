"""Talks to the application in-process, without sockets."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import httpx

from pagedjax.server.app import create_app
from tests.server.fakes import FakeAsyncEngine


def strict_json(text: str) -> Any:
    """JSON as the standard has it: NaN and Infinity are errors."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} in JSON")

    return json.loads(text, parse_constant=refuse)


def with_client(
    engine: FakeAsyncEngine, work: Callable[[httpx.AsyncClient], Awaitable[Any]], keys: tuple[str, ...] = ()
) -> Any:
    """The result of `work(client)`, in a loop of its own."""

    async def run() -> Any:
        transport = httpx.ASGITransport(create_app(engine, keys))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await work(client)

    return asyncio.run(run())


def post(engine: FakeAsyncEngine, path: str, body: Any, **options: Any) -> httpx.Response:
    """One POST; a body that is bytes goes out as it is."""
    headers = {"Content-Type": "application/json", **options.pop("headers", {})}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return with_client(engine, lambda client: client.post(path, content=data, headers=headers), **options)


def get(engine: FakeAsyncEngine, path: str, **options: Any) -> httpx.Response:
    headers = options.pop("headers", {})
    return with_client(engine, lambda client: client.get(path, headers=headers), **options)


def ok(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return strict_json(response.text)


def events(response: httpx.Response) -> list[Any]:
    """The objects of a stream that ended as it should."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, last = [line for line in response.text.split("\n") if line]
    assert last == "data: [DONE]"
    return [strict_json(line.removeprefix("data: ")) for line in lines]


def error(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    """The error of a refused request, whose shape is checked."""
    assert response.status_code == status, (response.status_code, response.text)
    body = strict_json(response.text)
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    if param is not None:
        assert body["error"]["param"] == param, body
    return body["error"]


def joined(lists: Iterable[list]) -> list:
    return list(itertools.chain.from_iterable(lists))


def samples(text: str) -> dict[str, float]:
    """Prometheus text to {name{labels}: value}."""
    out = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            assert math.isfinite(float(value))
            out[name] = float(value)
    return out
