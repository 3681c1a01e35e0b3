"""What every command does alike: flags out of dataclasses, `--help`, `--print_config`, errors as one line, Ctrl-C."""

from __future__ import annotations

import logging
import re
import sys
import typing
from collections.abc import Callable, Sequence
from typing import Any

from absl import app
from absl import flags as absl_flags

from pagedjax.errors import ConfigError, PagedJaxError
from pagedjax.flags import ARGUMENT, ENGINE, Schema, convert, parse
from pagedjax.help_text import describe, help_text
from pagedjax.options import check, options

_HELP = {"--help", "-help", "-h", "-?", "--helpshort"}
_DASHES = re.compile(r"(--?)(?!config\b)([A-Za-z][\w-]*)(=.*)?", re.DOTALL)


def define_options(table: type, flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """Defines a flag for each field of a dataclass made with `pagedjax.options.option`; `read_options` reads them."""
    for name, entry in options(table()):
        define: Callable[..., Any] = absl_flags.DEFINE_string
        if entry.type is bool:
            define = absl_flags.DEFINE_bool
        elif typing.get_origin(entry.type) is tuple:
            define = absl_flags.DEFINE_multi_string
        define(name, None, entry.field.metadata["help"], flag_values)


def read_options(table: type, flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> Any:
    """An instance of `table` with what was given on the command line. ConfigError names the flag, its range and the text."""
    given = {}
    for name, entry in options(table()):
        text = flag_values[name].value
        if text is None:
            continue
        if isinstance(text, list) and not entry.field.metadata["repeated"]:
            text = ",".join(text)
        value = text if isinstance(text, bool) else tuple(text) if isinstance(text, list) else convert(text, entry.type)
        check(name, text if value is None else value, entry.type, entry.field.metadata, "--")
        given[name] = value
    return table(**given)


def with_underscores(argv: Sequence[str]) -> list[str]:
    """`--num-prompts` may be written for `--num_prompts`, as other tools have it."""
    out = list(argv)
    for i, argument in enumerate(argv):
        if argument == "--":
            break
        if match := _DASHES.fullmatch(argument):
            out[i] = match[1] + match[2].replace("-", "_") + (match[3] or "")
    return out


def run(
    main: Callable[..., int | None],
    usage: str,
    tables: Sequence[type] = (),
    argv: Sequence[str] | None = None,
    *,
    schema: Schema | None = ENGINE,
) -> None:
    """Runs a command: parses its arguments, answers --help and --print_config, turns our own errors into one line and exit 1.

    Args:
      main: called as main(config, *instances), or main(*instances) without a schema; returns the exit status (None: 0).
      usage: what --help prints first.
      tables: dataclasses whose fields are flags of the same name; a default, range and meaning live there, once.
      argv: with the program's name first; None: sys.argv.
      schema: of the command's configuration; None: it takes none, and `--config` is an error.
    """
    parsed: list[Any] = []
    # What JAX finds no driver for is nobody's concern.
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)

    def parser(argv: Sequence[str]) -> list[str]:
        for table in tables:
            define_options(table)
        if _HELP & set(argv[1:]):
            print(help_text(usage, tables=tables, schema=schema))
            sys.exit(0)
        argv = with_underscores(argv)
        try:
            if schema:
                absl_flags.DEFINE_bool("print_config", False, "print the effective configuration and exit")
                config, positional = parse(argv, schema=schema)
                parsed.append(config)
            else:
                positional = _without_config(argv)
            if positional:
                raise ConfigError(f"unexpected argument {positional[0]!r}; options start with --")
            parsed.extend(read_options(table) for table in tables)
        except ConfigError as e:
            fail(e)
        if schema and absl_flags.FLAGS.print_config:
            print(describe(parsed[0], schema), end="")
            sys.exit(0)
        return [argv[0]]

    app.run(lambda _: _guarded(lambda: main(*parsed)), argv=list(argv or sys.argv), flags_parser=parser)


def _without_config(argv: Sequence[str]) -> list[str]:
    if any(ARGUMENT.fullmatch(argument) for argument in argv[1:]):
        raise ConfigError("--config: this command builds no engine, so it takes no configuration")
    try:
        return absl_flags.FLAGS(list(argv))[1:]
    except absl_flags.Error as e:
        raise ConfigError(str(e)) from None


def _guarded(work: Callable[[], int | None]) -> int | None:
    """Our own errors as one line and exit status 1, Ctrl-C as 130."""
    try:
        return work()
    except PagedJaxError as e:
        fail(e)
    except OSError as e:
        if e.filename is None:
            raise
        fail(f"{e.filename}: {e.strerror}")
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def fail(error: Exception | str) -> typing.NoReturn:
    """One clear line on stderr, exit status 1."""
    print(f"error: {error}", file=sys.stderr)
    sys.exit(1)
