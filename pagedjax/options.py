"""Options: dataclass fields that know their meaning and their range, and what can be done with trees of such dataclasses.

`pagedjax.flags` makes command lines and configuration files of them.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from pagedjax.errors import ConfigError

T = TypeVar("T")


def option(
    default: Any,
    help: str,  # noqa: A002
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple = (),
    repeated: bool = False,
) -> Any:
    """A dataclass field with its documentation and its range, both ends included.

    0 or "" stand for "choose for me" where the help says so. A number may be infinite where `high` is.

    Args:
      repeated: of a list whose items may hold commas: each is given by a flag of its own.
    """
    metadata = {"help": help, "low": low, "high": high, "choices": choices, "repeated": repeated}
    if isinstance(default, tuple):
        return dataclasses.field(default_factory=lambda: default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Option(typing.NamedTuple):
    """One leaf of the configuration: its dataclass field, resolved type and value."""

    field: dataclasses.Field
    type: Any
    value: Any


def options(config: Any, prefix: str = "") -> list[tuple[str, Option]]:
    """Every leaf of a configuration as (dotted path, Option), in the order of declaration."""
    hints = typing.get_type_hints(type(config))
    out: list[tuple[str, Option]] = []
    for field in dataclasses.fields(config):
        value, path = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(hints[field.name]):
            if not isinstance(value, hints[field.name]):
                raise ConfigError(f"config.{path}: must be a {hints[field.name].__name__}, got {value!r}")
            out += options(value, f"{path}.")
        else:
            out.append((path, Option(field, hints[field.name], value)))
    return out


def requirement(kind: Any, metadata: Any) -> str:
    """What an option takes, in words: "a whole number in [1, 256]"."""
    if metadata["choices"]:
        several = "any of " if typing.get_origin(kind) is tuple else "one of "
        return several + ", ".join(str(choice) or "nothing" for choice in metadata["choices"])
    if typing.get_origin(kind) is tuple:
        return "a list, each " + requirement(typing.get_args(kind)[0], metadata)
    name = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[kind]
    if kind in (int, float) and metadata["low"] is not None:
        return f"{name} in [{_plain(metadata['low'])}, {_plain(metadata['high'])}]"
    return name


def _plain(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def check(path: str, value: Any, kind: Any, metadata: Any, prefix: str = "config.") -> None:
    """Raises ConfigError, with the field's name, range and meaning, unless `value` is of type `kind` and in range."""
    if not _fits(value, kind, metadata):
        raise ConfigError(f"{prefix}{path}: must be {requirement(kind, metadata)}; got {value!r} ({metadata['help']})")


def _fits(value: Any, kind: Any, metadata: Any) -> bool:
    if typing.get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_fits(v, typing.get_args(kind)[0], metadata) for v in value)
    if kind is bool or kind is str:
        return isinstance(value, kind) and (not metadata["choices"] or value in metadata["choices"])
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        return False
    finite = math.isfinite(value) or value == metadata["high"]
    return finite and (metadata["low"] is None or metadata["low"] <= value <= metadata["high"])


def unknown_key(path: str, config: Any) -> ConfigError:
    """The error for a key that `config` has not, with the nearest one that it has."""
    known = [name for name, _ in options(config)]
    sections = list(dict.fromkeys(name.split(".")[0] for name in known if "." in name))
    short = [*sections, *(name for name in known if "." not in name)]
    near = difflib.get_close_matches(path, known if "." in path else short, n=1, cutoff=0.6)
    if not near:  # the right name in the wrong section
        name = path.rsplit(".", 1)[-1]
        close = difflib.get_close_matches(name, [k.rsplit(".", 1)[-1] for k in known], n=1, cutoff=0.7)
        near = [k for k in known if close and k.rsplit(".", 1)[-1] == close[0]]
    section = path.split(".")[0]
    if near:
        hint = f"did you mean config.{near[0]}?"
    elif any(k.startswith(f"{section}.") for k in known):
        hint = f"config.{section} has " + ", ".join(k.split(".")[1] for k in known if k.startswith(f"{section}."))
    else:
        hint = "sections are " + ", ".join(sections)
    return ConfigError(f"config.{path}: no such option; {hint}")


def with_overrides(config: T, overrides: Mapping[str, Any]) -> T:
    """`config` with options replaced by dotted name, such as {"cache.page_size": 32}, all at once: what depends on one another
    is checked when all are in place. ConfigError for an unknown name."""
    known = {path for path, _ in options(config)}
    for path in overrides:
        if path not in known:
            raise unknown_key(path, config)
    return _replaced(config, {tuple(path.split(".")): value for path, value in overrides.items()})


def _replaced(node: Any, overrides: dict[tuple[str, ...], Any]) -> Any:
    changes = {}
    for name in dict.fromkeys(path[0] for path in overrides):
        inner = {path[1:]: value for path, value in overrides.items() if path[0] == name}
        changes[name] = inner[()] if () in inner else _replaced(getattr(node, name), inner)
    return dataclasses.replace(node, **changes)
