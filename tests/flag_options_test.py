"""Dataclasses of options as flags: types, ranges, spelling."""

import dataclasses
import math

import pytest
from absl import flags as absl_flags

from pagedjax import command_line, help_text
from pagedjax.errors import ConfigError
from pagedjax.options import option


@dataclasses.dataclass(frozen=True)
class Table:
    some_count: int = option(3, "how many", low=1, high=9)
    rate: float = option(math.inf, "how fast", low=0.5, high=math.inf)
    switch: bool = option(True, "on or off")
    kind: str = option("a", "which", choices=("a", "b"))
    items: tuple[float, ...] = option((1.0,), "which ones", low=0, high=10)
    lines: tuple[str, ...] = option((), "each of its own", repeated=True)


def read(*arguments):
    values = absl_flags.FlagValues()
    command_line.define_options(Table, values)
    values(["tool", *command_line.with_underscores(arguments)])
    return command_line.read_options(Table, values)


def test_values():
    assert read() == Table()
    found = read(
        "--some-count=4", "--rate=2.5", "--noswitch", "--kind=b", "--items=1,2", "--items=3", "--lines=a,b", "--lines=c"
    )
    assert found == Table(4, 2.5, False, "b", (1.0, 2.0, 3.0), ("a,b", "c"))
    assert read("--rate=inf").rate == math.inf


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--some_count=10", r"--some_count: must be a whole number in \[1, 9\]; got 10 \(how many\)"),
        ("--some_count=x", "got 'x'"),
        ("--rate=nan", "--rate"),
        ("--rate=-inf", "--rate"),
        ("--kind=c", "--kind: must be one of a, b"),
        ("--items=1,x", "--items: must be a list"),
        ("--items=11", "--items"),
    ],
)
def test_what_is_refused(argument, words):
    with pytest.raises(ConfigError, match=words):
        read(argument)


def test_spelling():
    given = ["--a-b=c-d", "--no-x-y", "--config.a-b=1", "--config=my-file.py", "-v", "file-name", "--", "--x-y"]
    expected = ["--a_b=c-d", "--no_x_y", "--config.a-b=1", "--config=my-file.py", "-v", "file-name", "--", "--x-y"]
    assert command_line.with_underscores(given) == expected


def test_help_lists_every_field():
    text = help_text.help_text("a tool", tables=[Table], schema=None)
    for field in dataclasses.fields(Table):
        assert f"--{field.name}\n" in text
    assert "a whole number in [1, 9] (default: 3)" in text
    assert "--config" not in text
