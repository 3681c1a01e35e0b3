"""A scripted `AsyncEngine` and a tokenizer of single bytes, so that the server is tested without a model."""

from __future__ import annotations

import asyncio
import dataclasses
import types
from collections import Counter
from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pagedjax.config import Config
from pagedjax.errors import EngineDeadError, InvalidRequestError, QueueFullError
from pagedjax.types import CompletionOutput, FinishReason, Logprob, Request, RequestOutput, TokenLogprobs
from pagedjax.weights import LoadedModel

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a byte (ids 0 to 255 in the order of the alphabet), then <|im_start|>, <|im_end|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


TOKENIZER = byte_tokenizer()

Script = Callable[[Request, int], str]


def fixed(text: str) -> Script:
    """Every continuation is `text`, ended by EOS unless max_tokens cut it."""
    return lambda request, index: text


class FakeAsyncEngine:
    """Yields `script(request, index)` for each continuation, `chunk` tokens at a time.

    A request holds one page for each 16 tokens of its prompt while it runs, so leaks show in `stats`.
    """

    def __init__(
        self,
        config: Config | None = None,
        script: Script | None = None,
        *,
        chunk: int = 1,
        delay: float = 0.0,
        max_model_len: int = 512,
        max_running: int = 8,
        tokenizer: PreTrainedTokenizerFast | None = TOKENIZER,
    ):
        self.config = config or Config()
        self.tokenizer = tokenizer
        self.loaded = LoadedModel(None, None, tokenizer, "fake")
        self.model_name = "fake"
        self.max_model_len = max_model_len
        self.vocab_size = 258
        self.num_usable_pages = 100
        self.secret = b"12345678"
        self.script = script or fixed("hello")
        self.chunk = chunk
        self.delay = delay
        self.max_running = max_running
        self.requests: list[Request] = []
        self.running: dict[str, int] = {}
        self.waiting = 0
        self.aborted: list[str] = []
        self.finished: Counter[str] = Counter()
        self.is_alive = True
        self.refusing = False
        self.cached_tokens = 0
        self.logprob = -0.5
        self.fail_after: int | None = None
        self.error: Exception = EngineDeadError("the engine has stopped")
        self._free = asyncio.Condition()

    async def start(self) -> None:
        self.is_alive = True

    async def shutdown(self, drain_seconds: float) -> None:
        self.refusing = True
        deadline = asyncio.get_running_loop().time() + drain_seconds
        while self.running and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        self.is_alive = False

    def stats(self) -> types.SimpleNamespace:
        """The fields of `EngineStats`."""
        used = sum(self.running.values())
        return types.SimpleNamespace(
            num_running=len(self.running),
            num_waiting=self.waiting,
            pages_active=used,
            pages_free=self.num_usable_pages - used - 7,
            pages_cached=7,
            pages_shared=0,
            pages_pending=0,
            sharing_ratio=0.25,
            owned_shares={"tokens": 0.75, "reserved": 0.25, "internal": 0.0},
            pool_shares={"tokens": 0.5, "free": 0.5},
            forks=3,
            page_copies=2,
            generation_tokens=0,
            cached_prompt_tokens=self.cached_tokens,
            prefix_queries=0,
            prefix_hits=0,
            preemptions=0,
            swapped_out_pages=0,
            swapped_in_pages=0,
            spilled_pages=0,
            revived_pages=0,
            host_pages_used=3,
            host_pages_total=9,
            steps=0,
            dispatches=0,
            compilations_after_warm_up=0,
            pages_total=self.num_usable_pages,
            kv_usage=used / self.num_usable_pages,
            prompt_tokens=sum(len(r.prompt_ids) for r in self.requests),
            requests_finished=dict(self.finished),
        )

    async def generate(self, request: Request):
        if self.refusing or not self.is_alive:
            raise EngineDeadError("the server is shutting down")
        if len(request.prompt_ids) >= self.max_model_len:
            raise InvalidRequestError(
                "prompt", f"has {len(request.prompt_ids)} tokens; at most {self.max_model_len - 1} fit"
            )
        if self.waiting >= self.config.scheduler.max_waiting:
            raise QueueFullError("full")
        self.requests.append(request)
        await self._admit()
        self.running[request.request_id] = -(-len(request.prompt_ids) // 16)
        done = False
        try:
            async for delta in self._deltas(request):
                yield delta
            done = True
        finally:
            if not done:
                self.aborted.append(request.request_id)
            self.finished["stop" if done else "abort"] += 1
            del self.running[request.request_id]
            async with self._free:
                self._free.notify()

    async def _admit(self) -> None:
        self.waiting += 1
        try:
            async with self._free:
                await self._free.wait_for(lambda: len(self.running) < self.max_running)
        finally:
            self.waiting -= 1

    async def _deltas(self, request: Request):
        sampling = request.sampling
        plans = [self._plan(request, i) for i in range(sampling.n)]
        generated = position = 0
        started = asyncio.get_running_loop().time()
        while any(position < len(ids) for ids, _ in plans):
            await asyncio.sleep(self.delay)
            if request.deadline is not None and asyncio.get_running_loop().time() - started > request.deadline:
                ended = [CompletionOutput(i, "", [], finish_reason=FinishReason.DEADLINE) for i in range(sampling.n)]
                yield RequestOutput(
                    request.request_id, request.prompt_ids, ended, finished=True, num_generated_tokens=generated
                )
                return
            if not self.is_alive:
                raise EngineDeadError("the engine has stopped")
            if self.fail_after is not None and position >= self.fail_after:
                raise self.error
            outputs = []
            for index, (ids, reason) in enumerate(plans):
                new = ids[position : position + self.chunk]
                if not new:
                    continue
                generated += len(new)
                end = position + self.chunk >= len(ids)
                outputs.append(
                    CompletionOutput(
                        index=index,
                        text=self._text(ids[: position + len(new)], end)[len(self._text(ids[:position], False)) :],
                        token_ids=new,
                        logprobs=[self._logprobs(t) for t in new] if sampling.logprobs is not None else None,
                        finish_reason=reason if end else None,
                    )
                )
            position += self.chunk
            yield RequestOutput(
                request_id=request.request_id,
                prompt_ids=request.prompt_ids,
                outputs=outputs,
                finished=all(position >= len(ids) for ids, _ in plans),
                num_cached_tokens=self.cached_tokens,
                num_generated_tokens=generated,
                prompt_logprobs=self._prompt_logprobs(request) if sampling.prompt_logprobs is not None else None,
            )

    def _plan(self, request: Request, index: int) -> tuple[list[int], FinishReason]:
        ids = [*TOKENIZER.encode(self.script(request, index)), TOKENIZER.eos_token_id]
        limit = request.sampling.max_tokens
        room = self.max_model_len - len(request.prompt_ids)
        limit = room if limit is None else min(limit, room)
        return (ids, FinishReason.STOP) if len(ids) <= limit else (ids[:limit], FinishReason.LENGTH)

    def _text(self, ids: list[int], end: bool) -> str:
        """Incremental: what is not a whole character yet is held back."""
        text = TOKENIZER.decode(ids, skip_special_tokens=True)
        return text if end else text.rstrip("\ufffd")

    def _logprobs(self, token: int) -> TokenLogprobs:
        other = (token + 1) % 256
        return TokenLogprobs(
            Logprob(token, self.logprob, 1), (Logprob(token, self.logprob, 1), Logprob(other, -2.0, 2))
        )

    def _prompt_logprobs(self, request: Request) -> list[TokenLogprobs | None]:
        return [None, *(self._logprobs(t) for t in request.prompt_ids[1:])]


def config(**server) -> Config:
    """A configuration with some server options changed."""
    base = Config()
    return dataclasses.replace(base, server=dataclasses.replace(base.server, **server))
