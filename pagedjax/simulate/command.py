"""The command's configuration: a system, a workload, and lists of what to vary."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from ml_collections import config_dict

from pagedjax.errors import ConfigError
from pagedjax.flags import Schema
from pagedjax.options import check, option, options
from pagedjax.simulate.config import SimConfig
from pagedjax.simulate.workload import Workload, conversations, independent, read_trace


@dataclasses.dataclass(frozen=True)
class WorkloadConfig:
    """What arrives."""

    kind: str = option(
        "independent",
        "independent: requests one by one; chat: turns of conversations; trace: a file",
        choices=("independent", "chat", "trace"),
    )
    trace: str = option(
        "", "JSONL file with arrival (s), prompt and output (tokens) of a request a line; for kind trace"
    )
    lengths: str = option("sharegpt", "lengths with the means of this data set", choices=("sharegpt", "alpaca"))
    num_requests: int = option(500, "requests", low=1, high=10**6)
    rate: float = option(1.0, "requests a second; a trace keeps its own unless `rates` are given", low=1e-6, high=1e6)
    burstiness: float = option(
        1.0, "coefficient of variation of the time between arrivals; 1: Poisson, 0: even", low=0.0, high=100.0
    )
    prefix_tokens: int = option(0, "tokens that prompts begin with in common; for kind independent", low=0, high=2**17)
    num_prefixes: int = option(1, "different ones of these", low=1, high=10**6)
    num_tenants: int = option(1, "tenants, for policy fair_share", low=1, high=1024)
    seed: int = option(0, "of lengths and times", low=0, high=2**31 - 1)


@dataclasses.dataclass(frozen=True)
class SweepConfig:
    """What is varied: every combination is a run. Empty: the one value that `system` and `workload` have."""

    rates: tuple[float, ...] = option((), "requests a second", low=1e-6, high=1e6)
    schemes: tuple[str, ...] = option((), "as system.scheme")
    page_sizes: tuple[int, ...] = option((), "as system.page_size, each with a program of its own", low=1, high=2048)
    policies: tuple[str, ...] = option((), "as system.policy")
    preemptions: tuple[str, ...] = option((), "as system.preemption")
    samples: tuple[int, ...] = option((), "as system.samples, each with a program of its own", low=1, high=16)
    seeds: tuple[int, ...] = option((), "as workload.seed", low=0, high=2**31 - 1)


@dataclasses.dataclass(frozen=True)
class CommandConfig:
    """All of it; `configs/simulate/*.py` start from `default_command_config()`. ConfigError names field, value and range."""

    system: SimConfig = dataclasses.field(default_factory=SimConfig)
    workload: WorkloadConfig = dataclasses.field(default_factory=WorkloadConfig)
    sweep: SweepConfig = dataclasses.field(default_factory=SweepConfig)

    def __post_init__(self) -> None:
        for path, entry in options(self):
            if not path.startswith("system."):  # checked when it was made
                check(path, entry.value, entry.type, entry.field.metadata)
        if self.workload.trace and self.workload.kind != "trace":
            raise ConfigError(f"config.workload.trace: needs config.workload.kind=trace, got {self.workload.kind!r}")


SIMULATION = Schema(CommandConfig, "pagedjax.simulate.command.default_command_config")


def default_command_config() -> config_dict.ConfigDict:
    """Every option at its default, as a ConfigDict whose fields can be set."""
    return SIMULATION.config_dict()


def make_workload(config: WorkloadConfig, system: SimConfig) -> Workload:
    """The workload that a configuration describes. ConfigError where a trace cannot be read."""
    if config.kind == "trace":
        if not config.trace:
            raise ConfigError("config.workload.trace: name the file, for config.workload.kind=trace")
        try:
            return read_trace(config.trace)
        except (OSError, ValueError) as e:
            raise ConfigError(f"config.workload.trace: {e}") from None
    common: dict[str, Any] = dict(seed=config.seed, cv=config.burstiness)
    if config.kind == "chat":
        half = system.max_model_len // 2
        return conversations(
            config.num_requests, config.rate, config.lengths, max_prompt=half, max_output=half, **common
        )
    return independent(
        config.num_requests,
        config.rate,
        config.lengths,
        prefix_tokens=config.prefix_tokens,
        num_prefixes=config.num_prefixes,
        num_tenants=config.num_tenants,
        **common,
    )


def make_runs(config: CommandConfig) -> list[tuple[dict[str, Any], SimConfig, Workload]]:
    """Every combination of what is varied: (what is special about it, system, workload)."""
    swept = {name: values for name, values in dataclasses.asdict(config.sweep).items() if values}
    runs = []
    fields = {"schemes": "scheme", "page_sizes": "page_size", "policies": "policy", "preemptions": "preemption"}
    for values in itertools.product(*swept.values()):
        label = {fields.get(name, name.removesuffix("s") if name != "samples" else name): value
                 for name, value in zip(swept, values, strict=True)}  # fmt: skip
        changed: dict[str, Any] = {k: v for k, v in label.items() if k not in ("rate", "seed")}
        system = dataclasses.replace(config.system, **changed)
        varied: dict[str, Any] = {k: float(v) if k == "rate" else v for k, v in label.items() if k in ("rate", "seed")}
        workload = dataclasses.replace(config.workload, **varied)
        made = make_workload(workload, system)
        if workload.kind == "trace" and "rate" in label:
            made = made.at_rate(label["rate"])
        runs.append((label, system, made))
    return runs
