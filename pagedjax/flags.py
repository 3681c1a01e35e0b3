"""Command lines: `--config=FILE`, `--config.section.field=value`, `--print_config` and `--help` for every tool.

A configuration file is Python with a `get_config()` that returns `default_config_dict()` with some fields changed. The
fields, their types, ranges and meanings are those of `pagedjax.config`; nothing is declared here a second time.
"""

from __future__ import annotations

import ast
import difflib
import os
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from absl import app
from absl import flags as absl_flags
from ml_collections import config_dict, config_flags

from pagedjax.config import Config, Option, check, options, requirement, unknown_key, with_overrides
from pagedjax.errors import ConfigError, PagedJaxError

_ARGUMENT = re.compile(r"--?(?P<no>no)?config(?:\.(?P<path>[^=]*))?(?:=(?P<value>.*))?", re.DOTALL)
_HELP = {"--help", "-help", "-h", "-?", "--helpshort"}
_SECRET = "server.api_keys"
_DASHES = re.compile(r"(--?)(?!config\b)([A-Za-z][\w-]*)(=.*)?", re.DOTALL)


def default_config_dict() -> config_dict.ConfigDict:
    """Every option at its default, as a locked ConfigDict: what a configuration file starts from."""
    out: dict[str, Any] = {}
    for path, entry in options(Config()):
        *sections, name = path.split(".")
        node = out
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = entry.value
    return config_dict.ConfigDict(out).lock()


def freeze(config: Mapping[str, Any] | config_dict.ConfigDict) -> Config:
    """The typed configuration. Missing keys take their defaults; an unknown key or a bad value raises ConfigError."""
    if not isinstance(config, (Mapping, config_dict.ConfigDict)):
        raise ConfigError(f"get_config() must return a ConfigDict, got {type(config).__name__}")
    return _build(Config, config, "")


def _build(cls: type, values: Any, prefix: str) -> Any:
    if not isinstance(values, (Mapping, config_dict.ConfigDict)):
        raise ConfigError(f"config.{prefix[:-1]}: a section; set its fields, for example config.{_first_of(prefix)}")
    hints = typing.get_type_hints(cls)
    known = {}
    for key, value in values.items():
        if key not in hints:
            raise unknown_key(f"{prefix}{key}")
        if hasattr(hints[key], "__dataclass_fields__"):
            value = _build(hints[key], value, f"{prefix}{key}.")
        elif isinstance(value, list):
            value = tuple(value)
        elif hints[key] is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        known[key] = value
    return cls(**known)


def _first_of(prefix: str) -> str:
    return next(path for path in _leaves() if path.startswith(prefix))


def _leaves() -> dict[str, Option]:
    return dict(options(Config()))


def parse_value(path: str, text: str) -> Any:
    """The typed value of option `path` from its text on the command line; ConfigError names option, range and text."""
    leaves = _leaves()
    if path not in leaves:
        if any(k.startswith(f"{path}.") for k in leaves):
            raise ConfigError(
                f"config.{path}: a section; set its fields, for example --config.{_first_of(f'{path}.')}=..."
            )
        raise unknown_key(path)
    entry = leaves[path]
    value = _convert(text, entry.type)
    check(path, text if value is None else value, entry.type, entry.field.metadata)
    return value


def _convert(text: str, kind: Any) -> Any:
    """`text` as `kind`, or None where it is not one (no option takes None)."""
    if typing.get_origin(kind) is tuple:
        return _convert_tuple(text, typing.get_args(kind)[0])
    if kind is bool:
        return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(text.lower())
    try:
        return kind(text)
    except ValueError:
        return None


def _convert_tuple(text: str, kind: type) -> tuple | None:
    items: Iterable = text.split(",")
    if text.strip()[:1] in ("(", "["):
        try:
            items = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError):
            return None
        if not isinstance(items, (tuple, list)):
            items = (items,)
    out = tuple(_convert(str(item).strip(), kind) for item in items if str(item).strip())
    return None if None in out else out


def split_arguments(argv: Sequence[str]) -> tuple[str | None, dict[str, Any], list[str]]:
    """Takes the configuration's arguments out of a command line.

    Args:
      argv: the arguments, without the program's name.

    Returns:
      The configuration file (or None), the overrides (dotted path -> typed value; a list given several times is
      joined, otherwise the last one counts), and the arguments that are left.
    """
    file: str | None = None
    overrides: dict[str, Any] = {}
    rest: list[str] = []
    queue = list(argv)
    while queue:
        argument = queue.pop(0)
        if argument == "--":
            return file, overrides, [*rest, argument, *queue]
        match = _ARGUMENT.fullmatch(argument)
        if match is None:
            rest.append(argument)
            continue
        path, value = match["path"], match["value"]
        leaf = _leaves().get(path)
        if match["no"] or (value is None and leaf is not None and leaf.type is bool):
            if value is not None or leaf is None or leaf.type is not bool:
                raise unknown_key(path or "") if leaf is None else ConfigError(f"{argument}: 'no' is for true or false")
            value = "false" if match["no"] else "true"
        elif value is None:
            if not queue:
                raise ConfigError(f"{argument}: needs a value")
            value = queue.pop(0)
        if path is None:
            file = value
        else:
            new = parse_value(path, value)
            overrides[path] = (*overrides.get(path, ()), *new) if isinstance(new, tuple) else new
    return file, overrides, rest


def parse(argv: Sequence[str], flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> tuple[Config, list[str]]:
    """Reads a command line into the frozen configuration; other absl flags end up in `flag_values`.

    Args:
      argv: with the program's name first, as in sys.argv.

    Returns:
      The configuration and the positional arguments.

    Raises:
      ConfigError: an unknown option or flag, a value out of range, a file that is missing or fails.
    """
    file, overrides, rest = split_arguments(argv[1:])
    if file is None:
        config_flags.DEFINE_config_dict("config", default_config_dict(), "", flag_values, sys_argv=[])
    else:
        path = file.split(":", 1)[0]
        if not os.path.isfile(path):
            raise ConfigError(f"--config={file}: no such file{_nearby(path)}")
        config_flags.DEFINE_config_file("config", None, "", flag_values, sys_argv=[])
        rest = [f"--config={file}", *rest]
    try:
        positional = flag_values([argv[0], *rest])[1:]
        config = flag_values["config"].value
        config = freeze(config)
    except (absl_flags.Error, ConfigError) as e:
        raise ConfigError(_last_line(e)) from None
    except Exception as e:  # whatever the user's file raises
        raise ConfigError(f"--config={file}: {type(e).__name__}: {e}") from e
    return with_overrides(config, overrides), positional


def _nearby(path: str) -> str:
    folder = os.path.dirname(path) or "."
    names = [n for n in os.listdir(folder) if n.endswith(".py")] if os.path.isdir(folder) else []
    near = difflib.get_close_matches(os.path.basename(path), names, n=1)
    return f"; did you mean {os.path.join(folder, near[0])}?" if near else ""


def _last_line(error: Exception) -> str:
    """config_flags puts a whole traceback into its message; its end says what is wrong."""
    text = str(error)
    return text.strip().splitlines()[-1] if "Traceback" in text else text


def load(file: str | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """The configuration of a file (None: the defaults) with overrides, for notebooks and tests.

    >>> load(overrides={"cache.page_size": 32}).cache.page_size
    32
    """
    arguments = ["load"] if file is None else ["load", f"--config={file}"]
    config, _ = parse(arguments, absl_flags.FlagValues())
    return with_overrides(config, dict(overrides or {}))


def describe(config: Config) -> str:
    """`config` as a file that can be saved and given to `--config`, every option with its meaning and range."""
    lines = ["from pagedjax.flags import default_config_dict", "", "", "def get_config():"]
    lines.append("    config = default_config_dict()")
    defaults = _leaves()
    for path, entry in options(config):
        changed = "" if entry.value == defaults[path].value else f" (default: {defaults[path].value!r})"
        note = f"{entry.field.metadata['help']}; {requirement(entry.type, entry.field.metadata)}{changed}"
        lines += ["", *textwrap.wrap(note, 110, initial_indent="    # ", subsequent_indent="    # ")]
        if path == _SECRET and entry.value:
            lines.append(f"    # config.{path}: {len(entry.value)} given, not printed")
        else:
            lines.append(f"    config.{path} = {entry.value!r}")
    return "\n".join([*lines, "", "    return config", ""])


def help_text(
    usage: str,
    flag_values: absl_flags.FlagValues = absl_flags.FLAGS,
    module: str = "",
    tables: Sequence[type] = (),
    with_config: bool = True,
) -> str:
    """The whole `--help` of a tool: its usage, its own flags, every option of the configuration.

    Args:
      module: the one that defined flags of the tool's own.
      tables: dataclasses of options that are flags, see `run_with_options`.
      with_config: whether the tool takes a configuration.
    """
    lines = [usage.strip(), "", "flags:"]
    own = {f.name: f for f in flag_values.get_flags_for_module(module)} if module else {}
    rows = [(f"--{f.name}", f"{f.help} (default: {f.default!r})") for f in own.values()]
    rows += [(f"--{path}", _note(entry)) for table in tables for path, entry in options(table())]
    if with_config:
        rows += [
            (
                "--config=FILE",
                "a Python file with get_config(); the repository has some in configs/. Omitted: the defaults",
            ),
            ("--print_config", "print the effective configuration, as a file for --config, and exit"),
        ]
    rows.append(("--helpfull", "also list the flags of the libraries in use"))
    if with_config:
        rows += [(f"--config.{path}", _note(entry)) for path, entry in options(Config())]
    for name, note in rows:
        lines.append(f"  {name}")
        lines += textwrap.wrap(note, 108, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


def _note(entry: Option) -> str:
    default = ",".join(map(str, entry.value)) if isinstance(entry.value, tuple) else entry.value
    return f"{entry.field.metadata['help']}; {requirement(entry.type, entry.field.metadata)} (default: {default!r})"


def define_options(table: type, flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """Defines a flag for each field of a dataclass made with `pagedjax.config.option`; `read_options` reads them."""
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
        value = (
            text if isinstance(text, bool) else tuple(text) if isinstance(text, list) else _convert(text, entry.type)
        )
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


def run_with_options(
    main: Callable[..., int | None], usage: str, tables: Sequence[type], argv: Sequence[str], *, with_config: bool
) -> None:
    """As `run`, for a tool whose flags are dataclasses: calls main(config, *instances), or main(*instances) without.

    Args:
      tables: dataclasses whose fields are flags of the same name; a default, range and meaning live there, once.
      argv: with the program's name first.
      with_config: whether the tool takes a configuration; without, `--config` is an unknown flag.
    """
    parsed: list[Any] = []

    def parser(argv: Sequence[str]) -> list[str]:
        for table in tables:
            define_options(table)
        if _HELP & set(argv[1:]):
            print(help_text(usage, tables=tables, with_config=with_config))
            sys.exit(0)
        argv = with_underscores(argv)
        try:
            if with_config:
                absl_flags.DEFINE_bool("print_config", False, "print the effective configuration and exit")
                config, positional = parse(argv)
                parsed.append(config)
            else:
                positional = _without_config(argv)
            if positional:
                raise ConfigError(f"unexpected argument {positional[0]!r}; options start with --")
            parsed.extend(read_options(table) for table in tables)
        except ConfigError as e:
            fail(e)
        if with_config and absl_flags.FLAGS.print_config:
            print(describe(parsed[0]), end="")
            sys.exit(0)
        return [argv[0]]

    app.run(lambda _: _guarded(lambda: main(*parsed)), argv=list(argv), flags_parser=parser)


def _without_config(argv: Sequence[str]) -> list[str]:
    if any(_ARGUMENT.fullmatch(argument) for argument in argv[1:]):
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
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def run(main: Callable[[Config], int | None], usage: str, module: str = "__main__") -> None:
    """Runs a tool: parses sys.argv, answers --help and --print_config, turns our own errors into one line and exit 1.

    Args:
      main: takes the configuration, returns the exit status (None: 0).
      usage: what --help prints first.
      module: where the tool defined its absl flags.
    """
    parsed: list[Config] = []

    def parser(argv: Sequence[str]) -> list[str]:
        if _HELP & set(argv[1:]):
            print(help_text(usage, module=sys.argv[0] if module == "__main__" else module))
            sys.exit(0)
        absl_flags.DEFINE_bool("print_config", False, "print the effective configuration and exit")
        try:
            config, positional = parse(argv)
            if positional:
                raise ConfigError(f"unexpected argument {positional[0]!r}; options start with --")
        except ConfigError as e:
            fail(e)
        if absl_flags.FLAGS.print_config:
            print(describe(config), end="")
            sys.exit(0)
        parsed.append(config)
        return [argv[0]]

    app.run(lambda _: _guarded(lambda: main(parsed[0])), flags_parser=parser)


def fail(error: Exception | str) -> typing.NoReturn:
    """One clear line on stderr, exit status 1."""
    print(f"error: {error}", file=sys.stderr)
    sys.exit(1)
