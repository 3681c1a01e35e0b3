"""Requests to the engine on behalf of a client: admission, several at once, clean-up, timing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator, Sequence

from starlette.requests import Request as HttpRequest

from pagedjax.errors import InvalidRequestError, QueueFullError
from pagedjax.server.errors import ApiError, missed_deadline, shutting_down
from pagedjax.server.metrics import Stopwatch
from pagedjax.server.state import ServerState
from pagedjax.types import CompletionOutput, FinishReason, Request, RequestOutput, SamplingParams

_BUFFER = 64  # outputs of several prompts that may wait for a slow reader before the merge holds


@dataclasses.dataclass(frozen=True)
class Job:
    """What one HTTP request asks of the engine.

    Attributes:
      id: as it is shown to the client, "cmpl-..." or "chatcmpl-...".
      created: Unix time, seconds.
      requests: one a prompt. Choice number = position of the prompt x n + number of the continuation.
    """

    id: str
    created: int
    requests: tuple[Request, ...]

    @property
    def n(self) -> int:
        return self.requests[0].sampling.n


def make_job(
    state: ServerState,
    http: HttpRequest,
    kind: str,
    prompts: Sequence[tuple[str | None, Sequence[int]]],
    sampling: SamplingParams,
    *,
    cache_salt: str | None,
    priority: int | None,
    deadline: float | None,
) -> Job:
    """Checks that the server takes so much work, and puts it into requests, whose tenant is the client's API key.

    Raises:
      ApiError: 503 while the server shuts down or after the engine died.
      InvalidRequestError: too many sequences at once.
      QueueFullError: no room for all of them in the queue.
    """
    config = state.engine.config
    if state.draining:
        raise shutting_down()
    if not state.engine.is_alive:
        raise ApiError(503, "the engine has stopped", code="engine_unavailable")
    sequences = len(prompts) * sampling.num_sequences
    if sequences > config.server.max_sequences:
        raise InvalidRequestError("n", f"prompts x n may be {config.server.max_sequences} at most, got {sequences}")
    # The engine bounds its queue itself; here only, so that a request of many sequences is refused as a whole. One that
    # exceeds the bound alone is let through to an empty queue: it could never be served otherwise.
    waiting = state.engine.stats().num_waiting if sequences > 1 else 0
    if waiting and waiting + sequences > config.scheduler.max_waiting:
        raise QueueFullError("the queue is full")
    identity = f"{kind}-{secrets.token_hex(12)}"
    salt = _namespace(http, cache_salt, config.server.share_prefixes)
    requests = tuple(
        Request(
            request_id=f"{identity}-{i}",
            prompt_ids=tuple(ids),
            sampling=sampling,
            cache_salt=salt,
            prompt=text,
            priority=priority or 0,
            tenant=http.scope.get("pagedjax.tenant", ""),
            deadline=deadline,
        )
        for i, (text, ids) in enumerate(prompts)
    )
    return Job(identity, int(time.time()), requests)


def _namespace(http: HttpRequest, cache_salt: str | None, share: bool) -> str:
    """Of the prefix cache: one per key and salt, so that no client learns from timing what another one sent."""
    tenant = "" if share else http.scope.get("pagedjax.tenant", "")
    return f"{tenant}:{cache_salt}" if cache_salt else tenant


async def run(state: ServerState, job: Job) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(prompt number, delta) of all requests as they come. Closing it aborts what still runs.

    Raises:
      ApiError: 504 where the deadline passed before there was a first token. (Of several prompts the others may have some,
        so there each choice says for itself how it ended.)
    """
    if len(job.requests) == 1:
        async with contextlib.aclosing(_one(state, job.requests[0])) as deltas:
            async for delta in deltas:
                late = any(output.finish_reason is FinishReason.DEADLINE for output in delta.outputs)
                if late and delta.finished and not delta.num_generated_tokens:
                    raise missed_deadline()
                yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(_BUFFER)

    async def feed(number: int, request: Request) -> None:
        try:
            async with contextlib.aclosing(_one(state, request)) as deltas:
                async for delta in deltas:
                    await queue.put((number, delta))
        except Exception as error:
            await queue.put((number, error))
        else:
            await queue.put((number, None))

    tasks = [asyncio.create_task(feed(i, request)) for i, request in enumerate(job.requests)]
    try:
        running = len(tasks)
        while running:
            number, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _one(state: ServerState, request: Request) -> AsyncGenerator[RequestOutput, None]:
    watch = Stopwatch(state.metrics, request)
    async with contextlib.aclosing(state.engine.generate(request)) as deltas:
        async for delta in deltas:
            if any(o.finish_reason is FinishReason.ABORT for o in delta.outputs):
                raise shutting_down() if state.draining else ApiError(503, "the request was aborted", code="aborted")
            watch.observe(delta)
            yield delta


@dataclasses.dataclass
class Usage:
    """Token counts of a job: each prompt once, generated tokens summed over all continuations."""

    prompt: dict[int, int] = dataclasses.field(default_factory=dict)
    cached: dict[int, int] = dataclasses.field(default_factory=dict)
    generated: dict[int, int] = dataclasses.field(default_factory=dict)

    def observe(self, number: int, delta: RequestOutput) -> None:
        self.prompt[number] = len(delta.prompt_ids)
        self.cached[number] = delta.num_cached_tokens
        self.generated[number] = delta.num_generated_tokens

    def render(self) -> dict:
        prompt, generated = sum(self.prompt.values()), sum(self.generated.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }


@dataclasses.dataclass
class Collected:
    """Everything that came for one choice."""

    text: list[str] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, output: CompletionOutput) -> None:
        self.text.append(output.text)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason


async def collect(state: ServerState, job: Job) -> tuple[list[Collected], dict[int, RequestOutput], Usage]:
    """Runs a job to its end: its choices in order, the last delta of each prompt, its usage."""
    choices = [Collected() for _ in range(job.n * len(job.requests))]
    last: dict[int, RequestOutput] = {}
    usage = Usage()
    async with contextlib.aclosing(run(state, job)) as deltas:
        async for number, delta in deltas:
            usage.observe(number, delta)
            last[number] = delta
            for output in delta.outputs:
                choices[number * job.n + output.index].add(output)
    return choices, last, usage
