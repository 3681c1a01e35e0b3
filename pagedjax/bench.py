"""Measures a server, or the engine in this process. Flags and definitions are those of `vllm bench`.

usage: python -m pagedjax.bench serve [flags]
       python -m pagedjax.bench throughput [flags] [--config=FILE] [--config.section.field=value ...]
       python -m pagedjax.bench latency [flags] [--config=FILE] [--config.section.field=value ...]

serve       sends requests to a server with the OpenAI API (ours or another), at their own times, and reports throughput
            and latencies as its clients see them
throughput  has the engine generate for a whole dataset at once: requests and tokens per second
latency     has the engine run one batch of equal lengths over and over: seconds a batch

`python -m pagedjax.bench COMMAND --help` lists the flags of each. --some_flag may be written --some-flag.

  python -m pagedjax.bench serve --num_prompts=100 --input_len=128 --output_len=128 --ignore_eos --request_rate=4
  python -m pagedjax.bench throughput --num_prompts=64 --input_len=128 --output_len=128
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pagedjax import command_line
from pagedjax.benchmarking import offline
from pagedjax.flags import ENGINE

try:
    from pagedjax.benchmarking import serving
except ModuleNotFoundError as e:
    command_line.fail(f"the benchmarks need packages that are not installed ({e.name}): pip install 'pagedjax[bench]'")


class Command(NamedTuple):
    """Attributes:
    main: what it calls, with the configuration first where it has one.
    tables: its flags, see `pagedjax.command_line.run`.
    with_config: it builds an engine.
    about: begins its help.
    """

    main: Callable[..., int]
    tables: Sequence[type]
    with_config: bool
    about: str


COMMANDS = {
    "serve": Command(
        serving.serve,
        serving.OPTIONS,
        False,
        """Sends requests to a server with the OpenAI API and reports what its clients see.

usage: python -m pagedjax.bench serve [flags]

Requests are sent when they are due, whether or not earlier ones have been answered (open loop). All times are read from a
monotonic clock: TTFT from sending a request to its first chunk with output, ITL between such chunks, TPOT = (E2EL - TTFT) /
(output tokens - 1), normalized latency = E2EL / output tokens. Tokens are the server's count (usage) where it gives one.
Give --ignore_eos for outputs of exact lengths.""",
    ),
    "throughput": Command(
        offline.throughput,
        offline.THROUGHPUT_OPTIONS,
        True,
        """Has the engine generate for a whole dataset at once; the end of sequence is ignored.

usage: python -m pagedjax.bench throughput [flags] [--config=FILE] [--config.section.field=value ...]

The model is loaded and its programs are compiled before the clock starts.""",
    ),
    "latency": Command(
        offline.latency,
        offline.LATENCY_OPTIONS,
        True,
        """Has the engine run one batch of equal lengths over and over; the end of sequence is ignored.

usage: python -m pagedjax.bench latency [flags] [--config=FILE] [--config.section.field=value ...]

The prefix cache holds nothing of earlier runs for a run.""",
    ),
}


def main(argv: Sequence[str]) -> None:
    """The command that the first argument names, with the others."""
    name = argv[1] if len(argv) > 1 else ""
    if name in ("--help", "-help", "-h", "-?", "--helpshort", "--helpfull", "help"):
        print(__doc__.strip() if __doc__ else "")
        sys.exit(0)
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else "--help explains"
        command_line.fail(f"the first argument must be {', '.join(COMMANDS)}, got {name or 'none'!r}; {hint}")
    command = COMMANDS[name]
    argv = [f"{argv[0]} {name}", *argv[2:]]
    schema = ENGINE if command.with_config else None
    command_line.run(command.main, command.about, command.tables, argv, schema=schema)


if __name__ == "__main__":
    main(sys.argv)
