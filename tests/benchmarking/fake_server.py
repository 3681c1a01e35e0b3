"""A server of the OpenAI API that misbehaves as the prompt says, in the event loop of the test."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping

from aiohttp import web


class FakeServer:
    """Each request's prompt is a JSON list of steps that its answer consists of.

    A step is a text (a chunk with it), a number (seconds to wait), or one of: "!drop" (the connection breaks),
    "!end" (the stream just ends), "!wait N" (until N requests have come), "!done", "!usage N" (N completion tokens and 7
    prompt tokens), "!ids N" (a chunk with N token ids), "!stop" (a chunk with a finish reason), "!role" (a chat's first
    chunk), "!error TEXT", "!raw TEXT" (as it is), "!status N" (an answer with that status in place of a stream).
    """

    def __init__(self, *, token_ids: bool = True):
        self.bodies: list[dict] = []
        self.headers: list[Mapping[str, str]] = []  # names in any case
        self.running = self.most_running = 0
        self.refusals = 0
        self.token_ids = token_ids

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake"}]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(request.headers)
        prompt = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        if isinstance(prompt, list) and not self.token_ids:
            return web.json_response({"error": {"message": "prompt: must be a text"}}, status=400)
        if self.refusals:
            self.refusals -= 1
            return web.json_response({"error": {"message": "loading"}}, status=503)
        try:
            steps = json.loads(prompt)
        except (TypeError, ValueError):
            steps = ["x", "!stop", "!done"]
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._stream(request, steps, chat="messages" in body)
        finally:
            self.running -= 1

    async def _stream(self, request: web.Request, steps: list, *, chat: bool) -> web.StreamResponse:
        if steps and str(steps[0]).startswith("!status"):
            status = int(steps[0].split()[1])
            return web.json_response({"error": {"message": "the queue is full"}}, status=status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for step in steps:
            if isinstance(step, (int, float)):
                await asyncio.sleep(step)
                continue
            if step.startswith("!wait"):
                while len(self.bodies) < int(step.split()[1]):
                    await asyncio.sleep(0.005)
                continue
            if step == "!drop":
                request.transport.abort()
                return response
            if step == "!end":
                return response
            await response.write(self._event(step, chat=chat))
        return response

    def _event(self, step: str, *, chat: bool) -> bytes:
        name, _, rest = step.partition(" ")
        if name == "!raw":
            return rest.encode()
        if name == "!done":
            return b"data: [DONE]\n\n"
        choice: dict = {"index": 0, "finish_reason": None}
        event: dict = {"choices": [choice]}
        text = ""
        if name == "!usage":
            event = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": int(rest)}}
        elif name == "!error":
            event = {"error": {"message": rest, "code": 500}}
        elif name == "!stop":
            choice["finish_reason"] = "stop"
        elif name == "!ids":
            choice["token_ids"] = list(range(int(rest)))
        elif name != "!role":
            text = step
        choice.update({"delta": {"role": "assistant", "content": text}} if chat else {"text": text})
        return b": a comment\r\n\r\ndata: " + json.dumps(event).encode() + b"\n\n"


@contextlib.asynccontextmanager
async def serving(server: FakeServer) -> AsyncIterator[str]:
    """The server's address."""
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/completions", server.answer)
    app.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()
