"""Continues a file of prompts: JSON lines in, JSON lines out.

usage: python -m pagedjax.generate --input=FILE --output=FILE [--config=FILE] [--config.section.field=value ...]

An input line is an object with one of
  "prompt"     a text or a list of token ids (max_tokens is 16 unless given),
  "messages"   a conversation (max_tokens is the rest of the context unless given),
and, as it likes, "custom_id", "cache_salt" and sampling parameters ("temperature", "max_tokens", "n", "stop", "seed",
"logprobs", ...). Lines of OpenAI's batch format ("custom_id", "body") are read too.

Output lines come as they are finished; "index" is the input line's number from 0. A line that cannot be served becomes
an output line with an "error" and stops nothing. The same command again goes on where the last run ended.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import IO, Any

from tqdm import tqdm

from pagedjax import command_line
from pagedjax.config import Config
from pagedjax.errors import ConfigError, InvalidRequestError
from pagedjax.folders import check_file_target
from pagedjax.options import option
from pagedjax.types import CompletionOutput, FinishReason, Request, RequestOutput, SamplingParams, TokenLogprobs

_SAMPLING = tuple(field.name for field in dataclasses.fields(SamplingParams))
_OWN = ("prompt", "messages", "custom_id", "cache_salt", "max_completion_tokens", "top_logprobs")
_IGNORED = ("model", "user", "metadata", "stream", "stream_options", "store")  # of OpenAI bodies; no part of the answer
_PROMPT_MAX_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """The flags beside the configuration."""

    input: str = option("", "file with one JSON object a line")
    output: str = option("", "file to write; continued if it exists")
    overwrite: bool = option(False, "start over although the output exists")
    sampling: str = option("{}", "JSON object with sampling parameters for lines that do not set them")


@dataclasses.dataclass(frozen=True)
class Line:
    """One input line that is to be continued."""

    index: int
    input_hash: str
    custom_id: Any
    request: Request


class LineError(Exception):
    """An input line that cannot be served; becomes an output line."""

    def __init__(self, message: str, field: str | None = None, custom_id: Any = None):
        super().__init__(message)
        self.field = field
        self.custom_id = custom_id


def parse_line(index: int, raw: bytes, engine: Any, defaults: Mapping[str, Any]) -> Line:
    """An input line as a request.

    Args:
      index: number of the line, from 0.
      raw: the line.
      engine: an `Engine`, whose tokenizer and chat template are used.
      defaults: sampling parameters that the line may override.

    Raises:
      LineError: naming the field where there is one.
    """
    try:
        entry = json.loads(raw)
    except (ValueError, RecursionError) as e:  # UnicodeDecodeError is a ValueError
        raise LineError(f"not JSON: {e}") from None
    if not isinstance(entry, dict):
        raise LineError(f"must be a JSON object, got {type(entry).__name__}")
    custom_id = entry.get("custom_id")
    body = entry["body"] if isinstance(entry.get("body"), dict) else entry
    try:
        ids, text = _prompt(body, engine)
        sampling = _sampling_params(body, defaults)
        salt = body.get("cache_salt") or ""
        if not isinstance(salt, str):
            raise InvalidRequestError("cache_salt", f"must be a text, got {salt!r}")
    except InvalidRequestError as e:
        raise LineError(str(e), e.field, custom_id) from None
    request = Request(f"line-{index}", ids, sampling, cache_salt=salt, prompt=text)
    return Line(index, hash_of(raw, defaults), custom_id, request)


def hash_of(raw: bytes, defaults: Mapping[str, Any]) -> str:
    """What an output line remembers of its input line and of --sampling, so that a change is noticed."""
    sampling = json.dumps(defaults, sort_keys=True).encode() if defaults else b""
    return hashlib.sha256(raw.strip() + sampling).hexdigest()[:16]


def _prompt(body: Mapping[str, Any], engine: Any) -> tuple[tuple[int, ...], str | None]:
    prompt, messages = body.get("prompt"), body.get("messages")
    if (prompt is None) == (messages is None):
        raise InvalidRequestError("prompt", "give either prompt or messages")
    if messages is not None:
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages) or not messages:
            raise InvalidRequestError("messages", "must be a list of objects with role and content")
        return tuple(engine.loaded.encode_chat(messages)), None
    if isinstance(prompt, str):
        return tuple(engine.loaded.encode(prompt)), prompt
    if isinstance(prompt, list):
        return tuple(prompt), None  # the engine checks the ids
    raise InvalidRequestError("prompt", "must be a text or a list of token ids")


def _sampling_params(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    known = {*_SAMPLING, *_OWN, *_IGNORED}
    for name in body:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise InvalidRequestError(name, f"no such field{f'; did you mean {near[0]}?' if near else ''}")
    given = {**defaults, **{k: v for k, v in body.items() if k in _SAMPLING and v is not None}}
    if body.get("max_completion_tokens") is not None:
        given["max_tokens"] = body["max_completion_tokens"]
    if isinstance(given.get("logprobs"), bool):  # as in chat completions: a switch, and a number beside it
        given["logprobs"] = (body.get("top_logprobs") or 0) if given["logprobs"] else None
    given.setdefault("max_tokens", _PROMPT_MAX_TOKENS if body.get("messages") is None else None)
    return SamplingParams(**given)


def record_of(line: Line, output: RequestOutput) -> dict[str, Any]:
    """The output line of a request that has ended."""
    record: dict[str, Any] = {"index": line.index, "input_hash": line.input_hash}
    if line.custom_id is not None:
        record["custom_id"] = line.custom_id
    record["outputs"] = [_choice(out) for out in output.outputs]
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = [entry and _logprobs(entry) for entry in output.prompt_logprobs]
    record["usage"] = {
        "prompt_tokens": len(output.prompt_ids),
        "completion_tokens": output.num_generated_tokens,
        "cached_tokens": output.num_cached_tokens,
    }
    return record


def _choice(out: CompletionOutput) -> dict[str, Any]:
    reason = out.finish_reason
    choice: dict[str, Any] = {"text": out.text, "token_ids": out.token_ids, "finish_reason": reason and str(reason)}
    if out.stop_reason is not None:
        choice["stop_reason"] = out.stop_reason
    if out.logprobs is not None:
        choice["logprobs"] = [_logprobs(entry) for entry in out.logprobs]
    return choice


def _logprobs(entry: TokenLogprobs) -> dict[str, Any]:
    """NaN and infinities are not JSON; a masked token's -inf becomes -9999."""

    def finite(value: float) -> float | None:
        return None if value != value else min(max(value, -9999.0), 0.0)

    top = [[c.token_id, finite(c.logprob)] for c in entry.top]
    return {"token_id": entry.chosen.token_id, "logprob": finite(entry.chosen.logprob), "top": top}


def error_record(index: int, raw: bytes, error: LineError, defaults: Mapping[str, Any]) -> dict[str, Any]:
    record: dict[str, Any] = {"index": index, "input_hash": hash_of(raw, defaults)}
    if error.custom_id is not None:
        record["custom_id"] = error.custom_id
    record["error"] = {"line": index + 1, "field": error.field, "message": str(error)}
    return record


def resume(path: str) -> dict[int, str]:
    """Reads an output of an earlier run, cuts off a last line that was torn, and says which input lines it answers.

    Args:
      path: the output file; need not exist.

    Returns:
      Index of the input line -> hash of it.

    Raises:
      ConfigError: the file is something else.
    """
    done: dict[int, str] = {}
    if not os.path.exists(path):
        return done
    end = 0
    with open(path, "rb+") as file:
        for number, raw in enumerate(file, 1):
            try:
                entry = json.loads(raw)
                done[int(entry["index"])] = str(entry["input_hash"])
            except (ValueError, KeyError, TypeError):
                if not raw.endswith(b"\n"):
                    break
                raise ConfigError(
                    f"--output={path}: line {number} was not written by this tool; choose another file or --overwrite"
                ) from None
            end += len(raw)
            if not raw.endswith(b"\n"):  # whole, but for its end
                file.seek(0, os.SEEK_END)
                file.write(b"\n")
                return done
        file.truncate(end)
    return done


def _lock(out: IO[bytes], path: str) -> None:
    """ConfigError where another process writes to the file."""
    try:
        fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"--output={path}: another run is writing to it") from None


class Job:
    """Streams one file through an engine.

    Args:
      engine: an `Engine`; requests of its own are left alone.
      defaults: sampling parameters for lines that do not set them.
      progress: show a bar.
    """

    def __init__(self, engine: Any, defaults: Mapping[str, Any] | None = None, *, progress: bool = True):
        self.engine = engine
        self.defaults = dict(defaults or {})
        self.progress = progress
        self._running: dict[str, tuple[Line, bytes]] = {}
        self._whole: dict[str, RequestOutput] = {}
        self.counts: collections.Counter[str] = collections.Counter()

    def run(self, source: str, target: str) -> collections.Counter[str]:
        """Continues every line of `source` that `target` does not answer yet.

        Returns:
          Counts: "lines", "skipped" (answered by an earlier run), "errors", "tokens" generated.

        Raises:
          ConfigError: a file that cannot be opened, or an output that belongs to another input.
        """
        try:
            done = resume(target)
            with open(source, "rb") as file, open(target, "ab") as out:
                _lock(out, target)
                total = sum(1 for line in file if line.strip())
                file.seek(0)
                bar = tqdm(total=total, desc="Generating", unit="line", disable=not self.progress)
                try:
                    self._drive(self._pending(file, done, bar), out, bar)
                finally:
                    bar.close()
                    for request_id in list(self._running):
                        self.engine.abort(request_id)
                out.flush()
                os.fsync(out.fileno())
        except OSError as e:
            raise ConfigError(f"{e.filename or target}: {e.strerror}") from None
        return self.counts

    def _pending(self, file: IO[bytes], done: Mapping[int, str], bar: tqdm) -> Iterator[tuple[int, bytes]]:
        for index, raw in enumerate(file):
            if not raw.strip():
                continue
            self.counts["lines"] += 1
            if index not in done:
                yield index, raw
                continue
            if done[index] != hash_of(raw, self.defaults):
                raise ConfigError(
                    f"the output answers another input: line {index + 1} or --sampling has changed since; choose another "
                    "--output or --overwrite"
                )
            self.counts["skipped"] += 1
            bar.update()

    def _drive(self, pending: Iterator[tuple[int, bytes]], out: IO[bytes], bar: tqdm) -> None:
        """Keeps the engine supplied, with about twice what runs at once, and writes what it finishes."""
        from pagedjax.engine.llm import merge

        window = 2 * self.engine.config.scheduler.max_num_seqs
        more = True
        while more or self._running:
            while more and sum(line.request.sampling.n for line, _ in self._running.values()) < window:
                item = next(pending, None)
                more = item is not None
                if item is not None:
                    self._add(*item, out, bar)
            if not self._running:
                continue
            for delta in self.engine.step():
                if delta.request_id not in self._running:
                    continue
                whole = self._whole[delta.request_id] = merge(self._whole.get(delta.request_id), delta)
                if whole.finished:
                    self._finish(whole, out, bar)

    def _add(self, index: int, raw: bytes, out: IO[bytes], bar: tqdm) -> None:
        try:
            line = parse_line(index, raw, self.engine, self.defaults)
            try:
                self.engine.add_request(line.request)
            except InvalidRequestError as e:
                raise LineError(str(e), e.field, line.custom_id) from None
        except LineError as e:
            self.counts["errors"] += 1
            self._write(error_record(index, raw, e, self.defaults), out, bar)
        else:
            self._running[line.request.request_id] = line, raw

    def _finish(self, whole: RequestOutput, out: IO[bytes], bar: tqdm) -> None:
        line, raw = self._running.pop(whole.request_id)
        del self._whole[whole.request_id]
        if any(o.finish_reason is FinishReason.ABORT for o in whole.outputs):
            error = LineError("the engine aborted it", None, line.custom_id)
            self.counts["errors"] += 1
            self._write(error_record(line.index, raw, error, self.defaults), out, bar)
            return
        self.counts["tokens"] += whole.num_generated_tokens
        self._write(record_of(line, whole), out, bar)

    def _write(self, record: dict[str, Any], out: IO[bytes], bar: tqdm) -> None:
        out.write(json.dumps(record, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace") + b"\n")
        out.flush()
        bar.set_postfix(tokens=self.counts["tokens"], errors=self.counts["errors"], refresh=False)
        bar.update()


def main(config: Config, given: GenerateOptions) -> int:
    for name in ("input", "output"):
        if not getattr(given, name):
            raise ConfigError(f"--{name}: needed; --help explains")
    check_file_target("--output", given.output)
    if not os.path.isfile(given.input):
        raise ConfigError(f"--input={given.input}: no such file")
    if os.path.exists(given.output):
        if os.path.samefile(given.input, given.output):
            raise ConfigError("--output: is the input")
        if given.overwrite:
            os.remove(given.output)
    try:
        defaults = json.loads(given.sampling)
        SamplingParams(**defaults)
    except (ValueError, TypeError) as e:
        raise ConfigError(f"--sampling: {e}") from None
    resume(given.output)  # a file that is something else is found before minutes of loading
    from pagedjax.engine import build_engine  # a moment to import: the checks above answer at once

    job = Job(build_engine(config, progress=True), defaults)
    try:
        counts = job.run(given.input, given.output)
    except KeyboardInterrupt:
        print(f"\nstopped; the same command goes on where {given.output} ends", file=sys.stderr)
        return 130
    print(
        f"{counts['lines']} lines ({counts['skipped']} were there already, {counts['errors']} with an error), "
        f"{counts['tokens']} tokens: {given.output}",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    command_line.run(main, __doc__ or "", [GenerateOptions])
