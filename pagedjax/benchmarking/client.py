"""A client of an OpenAI-compatible server that takes the time of every chunk."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

import aiohttp

from pagedjax.benchmarking.outcome import Collector, Outcome, StreamError, error_text
from pagedjax.benchmarking.sse import EventDecoder
from pagedjax.benchmarking.workload import BenchRequest
from pagedjax.errors import ConfigError

_RETRY_SECONDS = 1.0
_KEEP_ALIVE_SECONDS = 4.0
"""Less than the five seconds after which common servers close an idle connection: none is used that is just closing."""
_PROBE_IDS = (100, 101, 102, 103)
_GIVE_UP = (400, 401, 403, 404, 405, 413, 422)


@dataclasses.dataclass(frozen=True)
class Target:
    """A server.

    Attributes:
      url: of the server, without a path.
      path: of the endpoint.
      chat: it takes messages.
      model: name in the requests.
      fields: further fields of every request's body.
      headers: of every request.
    """

    url: str
    path: str
    chat: bool
    model: str
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def body(self, request: BenchRequest) -> bytes:
        """The JSON body of a request, made before the clock starts."""
        body: dict[str, Any] = {"model": self.model}
        if self.chat:
            messages = request.messages or ({"role": "user", "content": request.prompt},)
            body["messages"] = list(messages)
        else:
            body["prompt"] = list(request.prompt) if isinstance(request.prompt, tuple) else request.prompt
        return json.dumps({**body, "max_tokens": request.output_len, "stream": True, **self.fields}).encode()


class Client:
    """Sends requests over one pool of connections. Use as an async context manager.

    Args:
      target: the server.
      timeout: most seconds that a request may take as a whole.
    """

    def __init__(self, target: Target, timeout: float):
        self.target = target
        self._timeout = timeout

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=3600, keepalive_timeout=_KEEP_ALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=self._timeout, sock_connect=60),
            headers={"Content-Type": "application/json", **self.target.headers},
            auto_decompress=True,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def send(self, body: bytes, prompt_len: int, origin: float, request_id: str = "") -> Outcome:
        """Sends one request and reads its stream; failures are part of the outcome, none is raised.

        Args:
          body: from `Target.body`.
          prompt_len: the prompt's tokens as the client knows them.
          origin: `time.perf_counter()` at the start of the run.
          request_id: sent as X-Request-Id, if not empty.
        """
        outcome = Outcome(prompt_len=prompt_len)
        headers = {"X-Request-Id": request_id} if request_id else None
        start = time.perf_counter()
        outcome.start = start - origin
        try:
            async with self._session.post(self.target.url + self.target.path, data=body, headers=headers) as response:
                outcome.status = response.status
                await _read(response, Collector(outcome, chat=self.target.chat), start)
        except StreamError as error:
            outcome.error = str(error)
        except TimeoutError:
            outcome.error = f"timed out after {time.perf_counter() - start:.1f} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            outcome.error = f"{type(error).__name__}: {error}".rstrip(": ")
        if outcome.error:
            outcome.latency = time.perf_counter() - start
        return outcome

    async def first_model(self) -> str:
        """The first model that the server names. ConfigError where it names none."""
        url = f"{self.target.url}/v1/models"
        try:
            async with self._session.get(url) as response:
                body = await response.json(content_type=None)
            return str(body["data"][0]["id"])
        except (aiohttp.ClientError, OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise ConfigError(
                f"--model: needed, since {url} does not name one ({type(error).__name__}: {error})"
            ) from None

    async def wait_until_ready(self, seconds: float) -> None:
        """Returns once the server answers at all.

        Raises:
          ConfigError: nobody answered for so long; says what happened last.
        """
        deadline, waits = time.monotonic() + seconds, _Waits(seconds)
        while True:
            try:
                async with self._session.get(f"{self.target.url}/v1/models") as response:
                    if response.status < 500:
                        return
                    last = f"HTTP {response.status}"
            except (aiohttp.ClientError, OSError) as error:
                last = f"{type(error).__name__}: {error}"
            if time.monotonic() + _RETRY_SECONDS > deadline:
                raise ConfigError(f"--base_url: no answer from {self.target.url} for {seconds:g} s: {last}")
            waits.say(f"no answer from {self.target.url} yet ({last})")
            await asyncio.sleep(_RETRY_SECONDS)

    async def probe(self, seconds: float, *, ids: bool) -> Outcome:
        """Has one token generated, trying again while the server is busy or still starts.

        Args:
          seconds: how long to try.
          ids: the prompt is token ids.
        """
        prompt: str | tuple[int, ...] = _PROBE_IDS if ids else "Hello"
        body = self.target.body(BenchRequest(prompt, len(prompt), 1))
        deadline, waits = time.monotonic() + seconds, _Waits(seconds)
        while True:
            outcome = await self.send(body, len(prompt), time.perf_counter())
            final = outcome.ok or outcome.status in _GIVE_UP
            if final or time.monotonic() + _RETRY_SECONDS > deadline:
                return outcome
            waits.say(f"a first request to {self.target.url}{self.target.path} failed ({outcome.error})")
            await asyncio.sleep(_RETRY_SECONDS)


class _Waits:
    """Says once why nothing happens, and for how long at most."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._said = seconds, False

    def say(self, why: str) -> None:
        if not self._said:
            self._said = True
            print(
                f"{why}; trying for up to {self._seconds:g} s (--ready_check_timeout_sec)", file=sys.stderr, flush=True
            )


async def _read(response: aiohttp.ClientResponse, collector: Collector, start: float) -> None:
    if response.status != 200:
        raise StreamError(f"HTTP {response.status}: {await _error_body(response)}")
    if not response.content_type.startswith("text/event-stream"):
        raise StreamError(f"the answer is {response.content_type}, not a stream of events")
    decoder = EventDecoder()
    async for data in response.content.iter_any():
        seconds = time.perf_counter() - start
        for event in decoder.feed(data):
            collector.add(event, seconds)
    for event in decoder.close():
        collector.add(event, time.perf_counter() - start)
    collector.finish()


async def _error_body(response: aiohttp.ClientResponse) -> str:
    text = await response.text(errors="replace")
    try:
        return error_text(json.loads(text))[:500]
    except ValueError:
        return text[:500].strip() or str(response.reason)
