"""Sizes of blocks, tiles and splits by (device kind, kernel, shape class): what was measured, else what heuristics say.

`scripts/tune_kernels.py` measures and writes `<device>.json`; it is looked for in `tuned/` beside this file and in
`tuned/` of the user's cache folder, whose entries win. A file that cannot be right is reported once and ignored as a
whole. PAGEDJAX_TUNED=0 leaves the files alone.

A row's result must be the same bit for bit whatever the other rows are. So a configuration follows from the ShapeClass
alone, and that has no number of rows, of tokens, or of pages in a table: how a row is cut into blocks and splits may
depend on what is static about the model, and on the row's own length.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import logging
import os
import pathlib
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from pagedjax_kernels.folders import cache_folder
from pagedjax_kernels.hardware import Hardware, current_hardware

logger = logging.getLogger("pagedjax_kernels")

SHIPPED = pathlib.Path(__file__).parent / "tuned"
Config = Mapping[str, int]
T = TypeVar("T", bound=tuple)


class ShapeClass(NamedTuple):
    """What a configuration may depend on, besides the device.

    Attributes:
      q_dtype, kv_dtype: names of dtypes.
      head_dim: of the queries.
      group: query heads per KV head.
      page_size: tokens a page.
    """

    q_dtype: str
    kv_dtype: str
    head_dim: int
    group: int
    page_size: int


class Knob(NamedTuple):
    """Values that a field may have: low to high, multiples of `step` or powers of two."""

    low: int
    high: int
    step: int = 1
    power_of_two: bool = False

    def wrong(self, value: Any) -> str | None:
        """What is wrong with a value, or None."""
        if type(value) is not int:  # a bool is an int
            return f"must be an integer, got {value!r}"
        if not self.low <= value <= self.high:
            return f"must be in [{self.low}, {self.high}], got {value}"
        if self.power_of_two and value & (value - 1):
            return f"must be a power of two, got {value}"
        return f"must be a multiple of {self.step}, got {value}" if value % self.step else None


class Kernel(NamedTuple):
    """Attributes:
    knobs: the fields of its configuration, in step with the NamedTuple that the kernel passes to `configured`.
    rule: (shape, configuration) -> what is wrong with values that are each possible, or None.
    """

    knobs: Mapping[str, Knob]
    rule: Callable[[ShapeClass, Config], str | None] = lambda shape, config: None


def _whole_blocks(shape: ShapeClass, config: Config) -> str | None:
    # Else a row's splits would change with the width of the page table, which is the longest row's business.
    span, block = config.get("min_span", 0), config.get("block_n", 1)
    return f"min_span must be a multiple of block_n = {block}, got {span}" if span % block else None


def _holds_a_query(shape: ShapeClass, config: Config) -> str | None:
    rows = config.get("block_m", shape.group)
    return None if rows >= shape.group else f"block_m must be at least the group of {shape.group} heads, got {rows}"


_PROGRAM = {"warps": Knob(1, 16, power_of_two=True), "stages": Knob(1, 8)}
KERNELS: Mapping[str, Kernel] = {
    "triton.decode": Kernel(
        {
            "block_n": Knob(16, 256, power_of_two=True),
            **_PROGRAM,
            "splits": Knob(1, 64, power_of_two=True),
            "min_span": Knob(16, 65536, step=16),
        },
        _whole_blocks,
    ),
    "triton.prefill": Kernel(
        {"block_m": Knob(16, 256, power_of_two=True), "block_n": Knob(16, 256, power_of_two=True), **_PROGRAM},
        _holds_a_query,
    ),
    "xla.decode": Kernel({"rows": Knob(1, 4096), "block_tokens": Knob(1, 8192)}),
    "xla.prefill": Kernel({"tile_queries": Knob(8, 4096, step=8), "block_tokens": Knob(1, 8192)}),
    "native_cpu.attention": Kernel({"chunk": Knob(64, 65536, step=64)}),
}
"""Every kernel that can be tuned, by backend and part. A configuration names all of its kernel's fields."""

_forced: contextvars.ContextVar[Mapping[str, Config] | None] = contextvars.ContextVar("forced", default=None)


@contextlib.contextmanager
def forced(configs: Mapping[str, Config]) -> Iterator[None]:
    """What is traced inside takes these configurations, and heuristics for all other kernels; no file is read."""
    token = _forced.set(configs)
    try:
        yield
    finally:
        _forced.reset(token)


def configured(kernel: str, shape: ShapeClass, default: T) -> T:
    """The configuration to use: a measured one of this device, kernel and shape class, or `default`.

    Args:
      kernel: a key of KERNELS.
      default: what heuristics say; a NamedTuple that has the kernel's fields, and maybe others.
    """
    forced_configs = _forced.get()
    if forced_configs is not None:
        return default._replace(**forced_configs.get(kernel, {}))  # type: ignore[attr-defined]
    if os.environ.get("PAGEDJAX_TUNED") == "0":
        return default
    found = _tables(device_name(current_hardware()), cache_folder("tuned")).get((kernel, shape), {})
    return default._replace(**found)  # type: ignore[attr-defined]


def device_name(hardware: Hardware) -> str:
    """The device kind; JAX calls all CPUs `cpu`, so of those the processor's own name."""
    return _processor() if hardware.platform == "cpu" else hardware.kind


def file_name(device: str) -> str:
    """Of the JSON file of a device: "NVIDIA H200" -> "nvidia-h200.json"."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"


def problem(kernel: str, shape: ShapeClass, config: Mapping[str, Any]) -> str | None:
    """The first reason why a kernel cannot take a configuration, or None."""
    knobs = KERNELS[kernel].knobs
    if config.keys() != knobs.keys():
        return f"must have the fields {', '.join(knobs)}, got {', '.join(config) or 'none'}"
    for name, knob in knobs.items():
        reason = knob.wrong(config[name])
        if reason is not None:
            return f"{name} {reason}"
    return KERNELS[kernel].rule(shape, config)


def parse(text: str, device: str) -> dict[tuple[str, ShapeClass], dict[str, int]]:
    """What a file says.

    Args:
      text: a JSON object: `device`; `tuned`, a list of objects with `kernel`, `shape`, `config` and, for people,
        `measured`; `measured_on`, for people.
      device: the device that it should be about.

    Raises:
      ValueError: names the place in the file, what is wrong there, and what is allowed.
    """
    data = json.loads(text)  # its errors are ValueErrors
    _expect(isinstance(data, dict), "the file", "must be an object")
    _fields(data, "the file", {"device", "tuned"}, {"measured_on"})
    _expect(data["device"] == device, "device", f"must be {device!r}, got {data['device']!r}")
    _expect(isinstance(data["tuned"], list), "tuned", "must be a list")
    found = {}
    for i, entry in enumerate(data["tuned"]):
        place = f"tuned[{i}]"
        _expect(isinstance(entry, dict), place, "must be an object")
        _fields(entry, place, {"kernel", "shape", "config"}, {"measured"})
        kernel = entry["kernel"]
        _expect(kernel in list(KERNELS), f"{place}.kernel", f"must be one of {', '.join(KERNELS)}, got {kernel!r}")
        for part in ("shape", "config"):
            _expect(isinstance(entry[part], dict), f"{place}.{part}", "must be an object")
        _fields(entry["shape"], f"{place}.shape", set(ShapeClass._fields), set())
        shape = ShapeClass(**entry["shape"])
        for name, value in entry["shape"].items():
            if name.endswith("dtype"):
                _expect(isinstance(value, str), f"{place}.shape.{name}", f"must be a name, got {value!r}")
            else:
                _expect(
                    type(value) is int and value >= 1, f"{place}.shape.{name}", f"must be at least 1, got {value!r}"
                )
        reason = problem(kernel, shape, entry["config"])
        _expect(reason is None, f"{place}.config", reason or "")
        _expect((kernel, shape) not in found, place, f"is the second for {kernel} and {tuple(shape)}")
        found[kernel, shape] = dict(entry["config"])
    return found


def _expect(right: bool, place: str, what: str) -> None:
    if not right:
        raise ValueError(f"{place}: {what}")


def _fields(data: Mapping[str, Any], place: str, needed: set[str], allowed: set[str]) -> None:
    missing, unknown = sorted(needed - data.keys()), sorted(data.keys() - needed - allowed)
    _expect(not missing, place, f"lacks {', '.join(missing)}")
    _expect(
        not unknown, place, f"has unknown fields {', '.join(unknown)}; known: {', '.join(sorted(needed | allowed))}"
    )


@functools.cache
def _tables(device: str, users: pathlib.Path) -> dict[tuple[str, ShapeClass], dict[str, int]]:
    """All measured configurations of a device; read once in a process."""
    found: dict[tuple[str, ShapeClass], dict[str, int]] = {}
    for folder in (SHIPPED, users):
        path = folder / file_name(device)
        try:
            entries = parse(path.read_text(encoding="utf-8"), device)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("%s is ignored, heuristics are used: %s", path, error)
            continue
        logger.info("%d tuned configurations for %s from %s", len(entries), device, path)
        found |= entries
    return found


@functools.cache
def _processor() -> str:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()
