"""Traces: what an engine was asked to do and when, so that another one can do the same again, page by page.

A trace is a file of JSON lines. The first one says what engine it was; each other one is an event of a step: a request
that was added, forked off or aborted before it, what was decided by the clock in it, and which tokens came out of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.engine.engine import Engine
from pagedjax.engine.records import request_from, request_record, sampling_record
from pagedjax.engine.snapshot import engine_shape, model_identity
from pagedjax.errors import InvalidRequestError, PagedJaxError, SnapshotError
from pagedjax.options import options
from pagedjax.types import Request, RequestOutput, SamplingParams

FORMAT = 1
_DECIDES = (
    "scheduler.",
    "runner.max_steps",
    "runner.stop_string_budget",
    "runner.lane_buckets",
    "runner.token_buckets",
)
"""Options, beside the engine's shape, that page tables depend on."""


class TraceRecorder:
    """An engine that writes down what it is asked. Stands wherever an `Engine` does, `LLM(engine=...)` for one.

    The file is readable by its owner only: prompts are in it, and the words that seed the prefix hash.

    Args:
      engine: new, with nothing served yet.
      path: the file to write; an existing one is replaced.

    Raises:
      ValueError: the engine has served something.
    """

    def __init__(self, engine: Engine, path: str | os.PathLike[str]) -> None:
        _require_new(engine)
        self._engine = engine
        self._step = 0
        self._choices: list[list[Any]] = []
        Path(path).unlink(missing_ok=True)
        self._file = open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8")  # noqa: SIM115
        self._write(_header(engine))
        engine.choices.hook = self._note_choice

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """The trace ends here; the engine goes on without it."""
        self._engine.choices.hook = None
        self._file.close()

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event) + "\n")

    def _note_choice(self, name: str, value: int) -> int:
        self._choices.append([name, int(value)])
        return value

    def add_request(self, request: Request, *, arrived: float | None = None) -> None:
        """As `Engine.add_request`; one that is refused is written down too, since it takes a seed like any other.

        Raises:
          InvalidRequestError: it has a deadline; when that passes is for the clock to say, not for a trace.
        """
        if request.deadline is not None:
            raise InvalidRequestError("deadline", "cannot be repeated from a trace; leave it out while recording")
        self._write({"step": self._step, "add": request_record(request)})
        self._engine.add_request(request, arrived=arrived)

    def fork(self, request_id: str, new_id: str, sampling: SamplingParams | None = None, *, index: int = 0) -> Request:
        """As `Engine.fork`."""
        record = None if sampling is None else sampling_record(sampling)
        self._write({"step": self._step, "fork": [request_id, new_id, record, index]})
        return self._engine.fork(request_id, new_id, sampling, index=index)

    def abort(self, request_id: str) -> None:
        """As `Engine.abort`."""
        self._write({"step": self._step, "abort": request_id})
        self._engine.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """As `Engine.step`."""
        outputs = self._engine.step()
        event = {"step": self._step, "choices": self._choices, "tokens": _tokens(outputs)}
        self._write(event)
        self._file.flush()
        self._step, self._choices = self._step + 1, []
        return outputs


def replay_trace(path: str | os.PathLike[str], engine: Engine) -> Iterator[list[RequestOutput]]:
    """Does in a new engine what a trace says: the same tokens come out, from the same pages.

    Args:
      path: written by `TraceRecorder`.
      engine: new, around the same model and of the same shape; its seeds and hash secret become the recorded ones.

    Yields:
      what each recorded step brought.

    Raises:
      SnapshotError: the trace is damaged or of another model or shape, or a step goes another way; names the step.
      ValueError: the engine has served something.
    """
    _require_new(engine)
    with open(path, encoding="utf-8") as file:
        lines = enumerate(file, 1)
        _adopt(engine, _parse(path, *next(lines, (1, ""))), path)
        choices: list[list[Any]] = []

        def repeat(name: str, value: int) -> int:
            if not choices or choices[0][0] != name:
                raise SnapshotError(f"{path}: decides about {name!r}, where the trace has {choices[:1]}")
            return choices.pop(0)[1]

        engine.choices.hook = repeat
        try:
            for number, line in lines:
                event = _parse(path, number, line)
                if "tokens" not in event:
                    _ask(engine, event)
                    continue
                choices[:] = event["choices"]
                outputs = engine.step()
                if choices or _tokens(outputs) != event["tokens"]:
                    raise SnapshotError(
                        f"{path}:{number}: step {event['step']} goes another way: {_tokens(outputs)} came out, not "
                        f"{event['tokens']}; decisions left: {choices}"
                    )
                yield outputs
        finally:
            engine.choices.hook = None


def _require_new(engine: Engine) -> None:
    if engine.has_unfinished() or engine.counters.dispatches or engine.counters.prompt_tokens:
        raise ValueError(f"engine: must have served nothing yet, got {engine.counters.dispatches} dispatches")


def _deciding_options(engine: Engine) -> dict[str, Any]:
    found = {path: entry.value for path, entry in options(engine.config) if path.startswith(_DECIDES)}
    return json.loads(json.dumps(found))  # lists for tuples, as they come back from a file


def _header(engine: Engine) -> dict[str, Any]:
    secret = np.asarray(jax.device_get(engine.runner.state.pages.secret))
    return {
        "trace": FORMAT,
        "model": model_identity(engine.loaded),
        "shape": engine_shape(engine),
        "options": _deciding_options(engine),
        "seeds": engine._in_flight.seeds.bit_generator.state,
        "secret": secret.tolist(),
    }


def _adopt(engine: Engine, header: dict[str, Any], path: str | os.PathLike[str]) -> None:
    if header.get("trace") != FORMAT:
        raise SnapshotError(f"{path}: not a trace of format {FORMAT}")
    ours = {"shape": engine_shape(engine), "options": _deciding_options(engine)}
    ours["model"] = {k: v for k, v in model_identity(engine.loaded).items() if k != "name"}
    for part, values in ours.items():
        for name, value in values.items():
            if header[part].get(name) != value:
                raise SnapshotError(
                    f"{path}: {name} is {header[part].get(name)} in the trace and {value} in this engine; they must be "
                    "the same"
                )
    engine._in_flight.seeds.bit_generator.state = header["seeds"]
    state = engine.runner.state
    secret = jnp.array(np.array(header["secret"], np.uint32))
    engine.runner.load_state(
        state.replace(pages=state.pages.replace(secret=secret)),
        num_unowned=engine.runner.num_unowned,
        num_page_copies=engine.runner.num_page_copies,
    )


def _ask(engine: Engine, event: dict[str, Any]) -> None:
    try:
        if "add" in event:
            engine.add_request(request_from(event["add"]))
        elif "fork" in event:
            request_id, new_id, sampling, index = event["fork"]
            engine.fork(request_id, new_id, None if sampling is None else SamplingParams(**sampling), index=index)
        else:
            engine.abort(event["abort"])
    except SnapshotError:
        raise
    except PagedJaxError:
        pass  # as it was when it was recorded


def _parse(path: str | os.PathLike[str], number: int, line: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError as error:
        raise SnapshotError(f"{path}:{number}: damaged: {error}") from error
    if not isinstance(event, dict):
        raise SnapshotError(f"{path}:{number}: damaged: an object is expected")
    return event


def _tokens(outputs: list[RequestOutput]) -> list[list[Any]]:
    return [[out.request_id, part.index, part.token_ids] for out in outputs for part in out.outputs]
