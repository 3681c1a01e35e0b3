"""Configurations from files and command lines: `--config=FILE`, `--config.section.field=value`.

A configuration file is Python with a `get_config()` that returns `default_config_dict()` with some fields changed. The
fields, their types, ranges and meanings are those of `pagedjax.config`; nothing is declared here a second time. Commands
that are configured by something else than an engine's `Config` bring a `Schema` of their own.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import os
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from absl import flags as absl_flags
from ml_collections import config_dict, config_flags

from pagedjax.config import Config
from pagedjax.errors import ConfigError
from pagedjax.options import Option, check, options, unknown_key, with_overrides

ARGUMENT = re.compile(r"--?(?P<no>no)?config(?:\.(?P<path>[^=]*))?(?:=(?P<value>.*))?", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Schema:
    """What a command's configuration is.

    Attributes:
      root: the dataclass of it all, with a default for everything.
      start: dotted name of the function without arguments whose ConfigDict a configuration file begins with.
    """

    root: type
    start: str

    def leaves(self) -> dict[str, Option]:
        """Every option by its dotted path, at its default."""
        return dict(options(self.root()))

    def first_of(self, prefix: str) -> str:
        """The first option of a section."""
        return next(path for path in self.leaves() if path.startswith(prefix))

    def config_dict(self) -> config_dict.ConfigDict:
        """Every option at its default, as a locked ConfigDict."""
        return _config_dict(self.leaves())


ENGINE = Schema(Config, "pagedjax.flags.default_config_dict")
"""Of all that runs an engine."""


def default_config_dict() -> config_dict.ConfigDict:
    """Every option at its default, as a locked ConfigDict: what a configuration file starts from."""
    return ENGINE.config_dict()


def _config_dict(leaves: Mapping[str, Option]) -> config_dict.ConfigDict:
    out: dict[str, Any] = {}
    for path, entry in leaves.items():
        *sections, name = path.split(".")
        node = out
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = entry.value
    return config_dict.ConfigDict(out).lock()


def freeze(config: Mapping[str, Any] | config_dict.ConfigDict, schema: Schema = ENGINE) -> Any:
    """The typed configuration, an instance of schema.root. Missing keys take their defaults; an unknown key or a bad value
    raises ConfigError."""
    if not isinstance(config, (Mapping, config_dict.ConfigDict)):
        raise ConfigError(f"get_config() must return a ConfigDict, got {type(config).__name__}")
    return _build(schema, schema.root, config, "")


def _build(schema: Schema, cls: type, values: Any, prefix: str) -> Any:
    if not isinstance(values, (Mapping, config_dict.ConfigDict)):
        raise ConfigError(
            f"config.{prefix[:-1]}: a section; set its fields, for example config.{schema.first_of(prefix)}"
        )
    hints = typing.get_type_hints(cls)
    known = {}
    for key, value in values.items():
        if key not in hints:
            raise unknown_key(f"{prefix}{key}", schema.root())
        if hasattr(hints[key], "__dataclass_fields__"):
            value = _build(schema, hints[key], value, f"{prefix}{key}.")
        elif isinstance(value, list):
            value = _as_tuple(value)
        elif hints[key] is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        known[key] = value
    return cls(**known)


def _as_tuple(values: list | tuple) -> tuple:
    return tuple(_as_tuple(value) if isinstance(value, (list, tuple)) else value for value in values)


def parse_value(path: str, text: str, schema: Schema = ENGINE) -> Any:
    """The typed value of option `path` from its text on the command line; ConfigError names option, range and text."""
    leaves = schema.leaves()
    if path not in leaves:
        if any(k.startswith(f"{path}.") for k in leaves):
            raise ConfigError(
                f"config.{path}: a section; set its fields, for example --config.{schema.first_of(f'{path}.')}=..."
            )
        raise unknown_key(path, schema.root())
    entry = leaves[path]
    value = convert(text, entry.type)
    check(path, text if value is None else value, entry.type, entry.field.metadata)
    return value


def convert(text: str, kind: Any) -> Any:
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
    out = tuple(convert(str(item).strip(), kind) for item in items if str(item).strip())
    return None if None in out else out


def split_arguments(argv: Sequence[str], schema: Schema = ENGINE) -> tuple[str | None, dict[str, Any], list[str]]:
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
    queue, leaves = list(argv), schema.leaves()
    while queue:
        argument = queue.pop(0)
        if argument == "--":
            return file, overrides, [*rest, argument, *queue]
        match = ARGUMENT.fullmatch(argument)
        if match is None:
            rest.append(argument)
            continue
        path, value = match["path"], match["value"]
        leaf = leaves.get(path)
        if match["no"] or (value is None and leaf is not None and leaf.type is bool):
            if value is not None or leaf is None or leaf.type is not bool:
                if leaf is None:
                    raise unknown_key(path or "", schema.root())
                raise ConfigError(f"{argument}: 'no' is for true or false")
            value = "false" if match["no"] else "true"
        elif value is None:
            if not queue:
                raise ConfigError(f"{argument}: needs a value")
            value = queue.pop(0)
        if path is None:
            file = value
        else:
            new = parse_value(path, value, schema)
            overrides[path] = (*overrides.get(path, ()), *new) if isinstance(new, tuple) else new
    return file, overrides, rest


def parse(
    argv: Sequence[str], flag_values: absl_flags.FlagValues = absl_flags.FLAGS, schema: Schema = ENGINE
) -> tuple[Any, list[str]]:
    """Reads a command line into the frozen configuration; other absl flags end up in `flag_values`.

    Args:
      argv: with the program's name first, as in sys.argv.

    Returns:
      The configuration, an instance of schema.root, and the positional arguments.

    Raises:
      ConfigError: an unknown option or flag, a value out of range, a file that is missing or fails.
    """
    file, overrides, rest = split_arguments(argv[1:], schema)
    if file is None:
        config_flags.DEFINE_config_dict("config", schema.config_dict(), "", flag_values, sys_argv=[])
    else:
        path = file.split(":", 1)[0]
        if not os.path.isfile(path):
            raise ConfigError(f"--config={file}: no such file{_nearby(path)}")
        config_flags.DEFINE_config_file("config", None, "", flag_values, sys_argv=[])
        rest = [f"--config={file}", *rest]
    try:
        positional = flag_values([argv[0], *rest])[1:]
        config = freeze(flag_values["config"].value, schema)
    except (absl_flags.Error, ConfigError) as e:
        raise ConfigError(_last_line(e)) from None
    except AttributeError as e:
        missing = "get_config" in str(e)
        raise ConfigError(f"--config={file}: {'has no get_config()' if missing else f'AttributeError: {e}'}") from e
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
