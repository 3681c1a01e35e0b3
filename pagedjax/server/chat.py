"""POST /v1/chat/completions."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from pagedjax.errors import InvalidRequestError
from pagedjax.server.generation import Job, Usage, collect, make_job, run
from pagedjax.server.logprobs import chat_logprobs, prompt_logprobs
from pagedjax.server.prompts import encode_chat, truncated
from pagedjax.server.protocol import ChatCompletionRequest
from pagedjax.server.rendering import json_response
from pagedjax.server.state import ServerState
from pagedjax.server.streaming import EventStream, whole
from pagedjax.types import MAX_LOGPROBS, RequestOutput, SamplingParams


async def create_chat_completion(state: ServerState, http: HttpRequest, body: ChatCompletionRequest) -> Response:
    """Checks everything before it answers, then streams or collects. Errors name fields as the client does."""
    try:
        return await _create(state, http, body)
    except InvalidRequestError as e:
        raise InvalidRequestError(body.aliases().get(e.field, e.field), e.message) from None


async def _create(state: ServerState, http: HttpRequest, body: ChatCompletionRequest) -> Response:
    body.refuse_unsupported(state.metrics)
    sampling = _sampling(body)
    ids = await encode_chat(
        state,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )
    prompts = [(None, truncated(ids, body.truncate_prompt_tokens))]
    job = make_job(
        state,
        http,
        "chatcmpl",
        prompts,
        sampling,
        cache_salt=body.cache_salt,
        priority=body.priority,
        deadline=body.deadline,
    )
    writer = _Writer(state, body, job)
    if body.stream:
        return EventStream(_events(writer), state.engine.config.server.send_seconds, body.aliases())
    return await whole(http, _answer(writer))


def _sampling(body: ChatCompletionRequest) -> SamplingParams:
    """`max_tokens` that is not given means the rest of the context."""
    if body.max_completion_tokens is not None and body.max_tokens not in (None, body.max_completion_tokens):
        raise InvalidRequestError("max_completion_tokens", "differs from max_tokens; give one of them")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    changes: dict[str, Any] = {"max_tokens": limit}
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise InvalidRequestError("top_logprobs", "needs logprobs = true")
        if not 0 <= body.top_logprobs <= MAX_LOGPROBS:
            raise InvalidRequestError("top_logprobs", f"must be in [0, {MAX_LOGPROBS}], got {body.top_logprobs}")
    if body.logprobs:
        changes["logprobs"] = body.top_logprobs or 0
    return body.sampling_params(**changes)


@dataclasses.dataclass
class _Writer:
    """Builds the objects of one request."""

    state: ServerState
    body: ChatCompletionRequest
    job: Job

    def envelope(self, choices: list[dict], usage: dict | None) -> dict[str, Any]:
        out: dict[str, Any] = {
            "id": self.job.id,
            "object": "chat.completion.chunk" if self.body.stream else "chat.completion",
            "created": self.job.created,
            "model": self.state.engine.model_name,
            "choices": choices,
        }
        if usage is not None or (self.body.stream and self.body.include_usage):
            out["usage"] = usage
        return out

    def logprobs(self, entries: Any) -> dict | None:
        return chat_logprobs(self.state.vocabulary, entries or []) if self.body.logprobs else None

    def add_prompt(self, out: dict[str, Any], delta: RequestOutput) -> None:
        """The extensions about the prompt, which all choices share."""
        if self.body.prompt_logprobs is not None and delta.prompt_logprobs is not None:
            out["prompt_logprobs"] = prompt_logprobs(self.state.vocabulary, delta.prompt_logprobs)
        if self.body.return_token_ids:
            out["prompt_token_ids"] = list(self.job.requests[0].prompt_ids)


async def _answer(writer: _Writer) -> Response:
    collected, last, usage = await collect(writer.state, writer.job)
    choices = []
    for index, choice in enumerate(collected):
        out = {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.text)},
            "logprobs": writer.logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if writer.body.return_token_ids:
            out["token_ids"] = choice.token_ids
        choices.append(out)
    answer = writer.envelope(choices, usage.render())
    writer.add_prompt(answer, last[0])
    return json_response(answer)


async def _events(writer: _Writer) -> AsyncGenerator[dict[str, Any], None]:
    body, usage = writer.body, Usage()
    begun: set[int] = set()  # continuations whose role has been sent
    async with contextlib.aclosing(run(writer.state, writer.job)) as deltas:
        async for number, delta in deltas:
            usage.observe(number, delta)
            for output in delta.outputs:
                first = output.index not in begun
                if not (
                    output.text
                    or first
                    or output.finished
                    or body.return_token_ids
                    or (output.logprobs and body.logprobs)
                ):
                    continue  # tokens whose characters are not complete yet
                message: dict[str, Any] = {"role": "assistant"} if first else {}
                if output.text or first:
                    message["content"] = output.text
                choice = {
                    "index": output.index,
                    "delta": message,
                    "logprobs": writer.logprobs(output.logprobs),
                    "finish_reason": output.finish_reason,
                    "stop_reason": output.stop_reason,
                }
                if body.return_token_ids:
                    choice["token_ids"] = output.token_ids
                chunk = writer.envelope([choice], None)
                if not begun:
                    writer.add_prompt(chunk, delta)
                begun.add(output.index)
                yield chunk
    if body.include_usage:
        yield writer.envelope([], usage.render())
