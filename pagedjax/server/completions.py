"""POST /v1/completions."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from pagedjax.errors import InvalidRequestError
from pagedjax.server.generation import Job, Usage, collect, make_job, run
from pagedjax.server.logprobs import completion_logprobs, prompt_logprobs
from pagedjax.server.prompts import completion_prompts, decode_ids, truncated
from pagedjax.server.protocol import CompletionRequest
from pagedjax.server.rendering import json_response
from pagedjax.server.state import ServerState
from pagedjax.server.streaming import EventStream, whole
from pagedjax.types import MAX_LOGPROBS, SamplingParams, TokenLogprobs

DEFAULT_MAX_TOKENS = 16


async def create_completion(state: ServerState, http: HttpRequest, body: CompletionRequest) -> Response:
    """Checks everything before it answers, then streams or collects."""
    body.refuse_unsupported(state.metrics)
    sampling = _sampling(body)
    limit = state.engine.config.server.max_prompts
    prompts = await completion_prompts(state, body.prompt, limit)
    prompts = [(text, truncated(ids, body.truncate_prompt_tokens)) for text, ids in prompts]
    job = make_job(
        state,
        http,
        "cmpl",
        prompts,
        sampling,
        cache_salt=body.cache_salt,
        priority=body.priority,
        deadline=body.deadline,
    )
    echoes = [""] * len(prompts)
    if body.echo:
        cut = body.truncate_prompt_tokens is not None
        echoes = [await decode_ids(state, ids) if text is None or cut else text for text, ids in prompts]
    writer = _Writer(state, body, job, echoes)
    if body.stream:
        return EventStream(_events(writer), state.engine.config.server.send_seconds, body.aliases())
    return await whole(http, _answer(writer))


def _sampling(body: CompletionRequest) -> SamplingParams:
    changes: dict[str, Any] = {"max_tokens": DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens}
    if body.logprobs is not None:
        if not 0 <= body.logprobs <= MAX_LOGPROBS:
            raise InvalidRequestError("logprobs", f"must be in [0, {MAX_LOGPROBS}], got {body.logprobs}")
        changes["logprobs"] = body.logprobs
        if body.echo:
            changes["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    if body.echo and body.max_tokens == 0:  # the prompt alone, scored: one token is generated and left out
        changes["max_tokens"] = 1
        changes["min_tokens"] = 0
    return body.sampling_params(**changes)


@dataclasses.dataclass
class _Writer:
    """Builds the objects of one request."""

    state: ServerState
    body: CompletionRequest
    job: Job
    echoes: Sequence[str]

    @property
    def echo_only(self) -> bool:
        return bool(self.body.echo) and self.body.max_tokens == 0

    @property
    def _name(self) -> Callable[[int], str] | None:
        wants = (self.body.model_extra or {}).get("return_tokens_as_token_ids")
        return (lambda token_id: f"token_id:{token_id}") if wants is True else None

    def envelope(self, choices: list[dict], usage: dict | None) -> dict[str, Any]:
        out: dict[str, Any] = {
            "id": self.job.id,
            "object": "text_completion",
            "created": self.job.created,
            "model": self.state.engine.model_name,
            "choices": choices,
        }
        if usage is not None or (self.body.stream and self.body.include_usage):
            out["usage"] = usage
        return out

    def logprobs(self, number: int, prompt: Any, ids: Sequence[int], entries: Any, offset: int) -> dict | None:
        """Of new tokens, with the prompt's before them where `prompt` has its entries."""
        if self.body.logprobs is None:
            return None
        all_ids, all_entries = list(ids), list(entries or [])
        if prompt is not None and self.body.echo:
            limit = self.body.logprobs
            known = [e and TokenLogprobs(e.chosen, e.top[:limit]) for e in prompt]
            all_ids = [*self.job.requests[number].prompt_ids, *all_ids]
            all_entries = known + all_entries
        return completion_logprobs(self.state.vocabulary, all_entries, all_ids, offset, self._name)

    def usage(self, usage: Usage) -> dict:
        if self.echo_only:
            usage.generated = {}
        return usage.render()


async def _answer(writer: _Writer) -> Response:
    collected, last, usage = await collect(writer.state, writer.job)
    choices = []
    for index, choice in enumerate(collected):
        number = index // writer.job.n
        scored = last[number].prompt_logprobs
        if writer.echo_only:
            choice.text, choice.token_ids, choice.logprobs = [], [], []
            choice.finish_reason, choice.stop_reason = "length", None
        out = {
            "index": index,
            "text": writer.echoes[number] + "".join(choice.text),
            "logprobs": writer.logprobs(number, scored, choice.token_ids, choice.logprobs, 0),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if writer.body.prompt_logprobs is not None and scored is not None:
            out["prompt_logprobs"] = prompt_logprobs(writer.state.vocabulary, scored)
        if writer.body.return_token_ids:
            out["prompt_token_ids"] = list(writer.job.requests[number].prompt_ids)
            out["token_ids"] = choice.token_ids
        choices.append(out)
    return json_response(writer.envelope(choices, writer.usage(usage)))


async def _events(writer: _Writer) -> AsyncGenerator[dict[str, Any], None]:
    body, job, usage = writer.body, writer.job, Usage()
    length: dict[int, int] = {}  # characters sent so far, by choice
    async with contextlib.aclosing(run(writer.state, job)) as deltas:
        async for number, delta in deltas:
            usage.observe(number, delta)
            for output in delta.outputs:
                index = number * job.n + output.index
                first = index not in length
                text, ids, entries = output.text, output.token_ids, output.logprobs
                if writer.echo_only:
                    if not first:
                        continue
                    text, ids, entries = "", [], []
                echo = writer.echoes[number] if first else ""
                text = echo + text
                if not (
                    text or first or output.finished or body.return_token_ids or (entries and body.logprobs is not None)
                ):
                    continue  # tokens whose characters are not complete yet
                scored = delta.prompt_logprobs if first else None
                out: dict[str, Any] = {
                    "index": index,
                    "text": text,
                    "logprobs": writer.logprobs(number, scored, ids, entries, length.get(index, 0)),
                    "finish_reason": "length" if writer.echo_only else output.finish_reason,
                    "stop_reason": None if writer.echo_only else output.stop_reason,
                }
                if first and body.prompt_logprobs is not None and scored is not None:
                    out["prompt_logprobs"] = prompt_logprobs(writer.state.vocabulary, scored)
                if body.return_token_ids:
                    out["token_ids"] = ids
                    if first:
                        out["prompt_token_ids"] = list(job.requests[number].prompt_ids)
                length[index] = length.get(index, 0) + len(text)
                yield writer.envelope([out], None)
    if body.include_usage:
        yield writer.envelope([], writer.usage(usage))
