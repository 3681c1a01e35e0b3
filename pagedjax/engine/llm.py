"""`LLM`: offline generation."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from pagedjax.config import Config
from pagedjax.engine.build import build_engine
from pagedjax.engine.engine import Engine
from pagedjax.errors import InvalidRequestError
from pagedjax.options import with_overrides
from pagedjax.types import MAX_BEAM_WIDTH, CompletionOutput, Request, RequestOutput, SamplingParams

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model in memory, ready to continue prompts. Threads may share it; their calls run one after the other.

    Args:
      model: what `config.model.path` takes: 'default', a directory, a .gguf file, a Hugging Face id.
      config: a whole configuration, instead of the defaults.
      engine: an engine that exists already; then nothing else is used.
      progress: show progress bars.
      **overrides: single options under their dotted names with `__` for the dot, such as `cache__page_size=32`.

    Example:
      llm = LLM()
      print(llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text)
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: Config | None = None,
        engine: Engine | None = None,
        progress: bool = True,
        **overrides: Any,
    ) -> None:
        self._progress = progress
        if engine is None:
            config = with_overrides(config or Config(), {name.replace("__", "."): v for name, v in overrides.items()})
            if model is not None:
                config = dataclasses.replace(config, model=dataclasses.replace(config.model, path=model))
            engine = build_engine(config, progress=progress)
        self.engine = engine
        self._next_id = 0
        self._lock = threading.Lock()

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        priority: int = 0,
        tenant: str = "",
        deadline: float | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts; results come in their order.

        Args:
          prompts: a text, a list of token ids, or a list of either.
          sampling_params: one for all, or one a prompt. None: the defaults of SamplingParams.
          cache_salt: prefix-cache namespace.
          priority, tenant, deadline: see `Request`; a prompt's deadline counts from when it is queued.
          progress: overrides the constructor's.

        Raises:
          InvalidRequestError: before anything is generated, if any prompt or parameter cannot be served.
        """
        return self._run(
            [self._encode(p) for p in _as_list(prompts)],
            sampling_params,
            progress,
            cache_salt=cache_salt,
            priority=priority,
            tenant=tenant,
            deadline=deadline,
        )

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        priority: int = 0,
        tenant: str = "",
        deadline: float | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"}) or a list of them, through the model's chat template."""
        if not isinstance(messages, (list, tuple)):
            raise InvalidRequestError("messages", f"must be a list of messages, got {type(messages).__name__}")
        many: Any = messages if messages and not isinstance(messages[0], Mapping) else [messages]
        encoded: list[tuple[str | None, tuple[int, ...]]] = [
            (None, tuple(self.engine.loaded.encode_chat(list(m)))) for m in many
        ]
        return self._run(
            encoded,
            sampling_params,
            progress,
            cache_salt=cache_salt,
            priority=priority,
            tenant=tenant,
            deadline=deadline,
        )

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        beam_width: int = 4,
        *,
        n: int | None = None,
        max_tokens: int | None = 16,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
        ignore_eos: bool = False,
        detokenize: bool = True,
        cache_salt: str = "",
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """The n most likely continuations that a beam search finds, best first; `cumulative_logprob` says how likely.

        Beams share the pages of what they have in common. See SamplingParams for the meaning of the arguments.

        Args:
          n: hypotheses to return, by default all beam_width.
        """
        if not isinstance(beam_width, int) or not 1 <= beam_width <= MAX_BEAM_WIDTH:
            raise InvalidRequestError("beam_width", f"must be an integer in [1, {MAX_BEAM_WIDTH}], got {beam_width!r}")
        sampling = SamplingParams(
            n=beam_width if n is None else n,
            beam_width=beam_width,
            max_tokens=max_tokens,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            ignore_eos=ignore_eos,
            detokenize=detokenize,
        )
        return self.generate(prompts, sampling, cache_salt=cache_salt, progress=progress)

    def _encode(self, prompt: Prompt) -> tuple[str | None, tuple[int, ...]]:
        if isinstance(prompt, str):
            return prompt, tuple(self.engine.loaded.encode(prompt))
        return None, tuple(prompt)

    def _run(
        self,
        prompts: list[tuple[str | None, tuple[int, ...]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool | None,
        **fields: Any,
    ) -> list[RequestOutput]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        if not all(isinstance(sampling, SamplingParams) for sampling in sampling_params):
            raise InvalidRequestError("sampling_params", "must be a SamplingParams or a list of them")
        if len(sampling_params) != len(prompts):
            raise InvalidRequestError(
                "sampling_params", f"one for all or one a prompt: {len(prompts)} prompts, got {len(sampling_params)}"
            )
        with self._lock:
            requests = []
            for (text, ids), sampling in zip(prompts, sampling_params, strict=True):
                requests.append(Request(f"llm-{self._next_id}", ids, sampling, prompt=text, **fields))
                self._next_id += 1
            for request in requests:
                self.engine.check_request(request)
            return self._serve(requests, self._progress if progress is None else progress)

    def _serve(self, requests: list[Request], progress: bool) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        pending = list(reversed(requests))
        added: list[str] = []
        room = self.engine.config.scheduler.max_waiting
        bar = tqdm(total=len(requests), desc="Generating", unit="request", disable=not progress)
        try:
            with interrupts_held_back() as interrupted:
                while pending or self.engine.has_unfinished():
                    while pending and self.engine.num_waiting + pending[-1].sampling.num_sequences <= max(
                        room, pending[-1].sampling.num_sequences
                    ):
                        self.engine.add_request(pending[-1])
                        added.append(pending.pop().request_id)
                    for delta in self.engine.step():
                        whole = done[delta.request_id] = merge(done.get(delta.request_id), delta)
                        bar.update(int(whole.finished))
                    if interrupted():
                        raise KeyboardInterrupt
        except BaseException:
            for request_id in added:
                self.engine.abort(request_id)
            raise
        finally:
            bar.close()
        return [done[r.request_id] for r in requests]


@contextlib.contextmanager
def interrupts_held_back() -> Iterator[Callable[[], bool]]:
    """Ctrl-C sets a flag, to be looked at between steps, instead of raising anywhere.

    A step gives its state away before it has the next one; an exception in between would lose both. Outside the main
    thread nothing raises there anyway.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    seen = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: seen.set())
    try:
        yield seen.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt or several, as a list of texts and lists of ids."""
    if hasattr(prompts, "tolist"):  # a numpy or JAX array of ids
        prompts = prompts.tolist()
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, Mapping)) or not isinstance(prompts, Iterable):
        raise InvalidRequestError("prompts", f"must be a text, token ids, or a list of either, got {prompts!r}")
    many = [p.tolist() if hasattr(p, "tolist") else p for p in prompts]
    if many and isinstance(many[0], int):
        return [many]
    for prompt in many:
        if not isinstance(prompt, (str, list, tuple)):
            raise InvalidRequestError("prompts", f"each must be a text or a list of token ids, got {prompt!r}")
    return many


def merge(whole: RequestOutput | None, delta: RequestOutput) -> RequestOutput:
    """`whole` with a delta added to it; a new object where whole is None."""
    if whole is None:
        whole = dataclasses.replace(delta, outputs=[])
    index = {out.index: out for out in whole.outputs}
    for out in delta.outputs:
        if out.index not in index:
            whole.outputs.append(dataclasses.replace(out, token_ids=list(out.token_ids)))
        else:
            _extend(index[out.index], out)
    whole.outputs.sort(key=lambda out: out.index)
    whole.finished, whole.num_generated_tokens = delta.finished, delta.num_generated_tokens
    whole.num_cached_tokens, whole.prompt_logprobs = delta.num_cached_tokens, delta.prompt_logprobs
    return whole


def _extend(whole: CompletionOutput, delta: CompletionOutput) -> None:
    whole.text += delta.text
    whole.token_ids = whole.token_ids + delta.token_ids
    if delta.logprobs is not None:
        whole.logprobs = (whole.logprobs or []) + delta.logprobs
    whole.finish_reason, whole.stop_reason = delta.finish_reason, delta.stop_reason
    whole.cumulative_logprob = delta.cumulative_logprob
