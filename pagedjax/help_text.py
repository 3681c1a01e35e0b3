"""What commands print about themselves: `--help`, and the configuration in effect as a file."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from pagedjax.flags import ENGINE, Schema
from pagedjax.options import Option, options, requirement

_SECRET = "server.api_keys"


def describe(config: Any, schema: Schema = ENGINE) -> str:
    """`config` as a file that can be saved and given to `--config`, every option with its meaning and range."""
    module, start = schema.start.rsplit(".", 1)
    lines = [f"from {module} import {start}", "", "", "def get_config():", f"    config = {start}()"]
    defaults = schema.leaves()
    for path, entry in options(config):
        changed = "" if entry.value == defaults[path].value else f" (default: {defaults[path].value!r})"
        note = f"{entry.field.metadata['help']}; {requirement(entry.type, entry.field.metadata)}{changed}"
        lines += ["", *textwrap.wrap(note, 110, initial_indent="    # ", subsequent_indent="    # ")]
        if path == _SECRET and entry.value:
            lines.append(f"    # config.{path}: {len(entry.value)} given, not printed")
        else:
            lines.append(f"    config.{path} = {entry.value!r}")
    return "\n".join([*lines, "", "    return config", ""])


def help_text(usage: str, tables: Sequence[type] = (), schema: Schema | None = ENGINE) -> str:
    """The whole `--help` of a tool: its usage, its own flags, every option of the configuration.

    Args:
      tables: dataclasses of options that are flags, see `pagedjax.command_line.run`.
      schema: of the tool's configuration; None: it takes none.
    """
    lines = [usage.strip(), "", "flags:"]
    rows = [(f"--{path}", _note(entry)) for table in tables for path, entry in options(table())]
    if schema:
        rows += [
            (
                "--config=FILE",
                "a Python file with get_config(); the repository has some in configs/. Omitted: the defaults",
            ),
            ("--print_config", "print the effective configuration, as a file for --config, and exit"),
        ]
    rows.append(("--helpfull", "also list the flags of the libraries in use"))
    if schema:
        rows += [(f"--config.{path}", _note(entry)) for path, entry in schema.leaves().items()]
    for name, note in rows:
        lines.append(f"  {name}")
        lines += textwrap.wrap(note, 108, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


def _note(entry: Option) -> str:
    default = ",".join(map(str, entry.value)) if isinstance(entry.value, tuple) else entry.value
    return f"{entry.field.metadata['help']}; {requirement(entry.type, entry.field.metadata)} (default: {default!r})"
