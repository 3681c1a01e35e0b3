"""The systems that are compared, as configurations, and the workloads that are varied."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from pagedjax.simulate.config import SimConfig
from pagedjax.simulate.lengths import LENGTHS, LengthModel
from pagedjax.simulate.report import paper
from pagedjax.simulate.result import Result
from pagedjax.simulate.run import sweep
from pagedjax.simulate.workload import Workload, independent

ORCA = ("orca_max", "orca_pow2", "orca_oracle")
SLOWDOWN = sum(paper.KERNEL_SLOWDOWN) / 2
"""On the time that attention takes under paging: the middle of the paper's 20 to 26 %, in all of this report's runs."""

_FT_UNITS = 88 * 128
"""Units of FasterTransformer's memory: enough for any of its batches, whose size is what limits it, not an allocator."""


def system(scheme: str, preset: str = "a100-opt-13b", **options: Any) -> SimConfig:
    """A system with its memory and its costs. The paged one pays for its kernel."""
    slowdown = SLOWDOWN if scheme == "paged" else 1.0
    return SimConfig(scheme=scheme, preset=preset, **{"attention_slowdown": slowdown, **options})


def faster_transformer(preset: str, dataset: str, **options: Any) -> SimConfig:
    """Batches as large as in the authors' artifact, each run to its end."""
    batch = paper.FT_BATCH[preset, dataset]
    return system("faster_transformer", preset, **{**options, "max_running": batch, "num_pages": _FT_UNITS})


def variants(dataset: str, everything: bool) -> dict[str, tuple[LengthModel, int]]:
    """What the paper leaves open, one thing varied at a time: (lengths, seed) by name; the first is what we show.

    It prints the means of the lengths alone, so the spread of each varies by a fifth to a quarter, and so does the seed.
    """
    base = LENGTHS[dataset]

    def spread(**changes: float) -> LengthModel:
        return dataclasses.replace(base, **{name: getattr(base, name) + by for name, by in changes.items()})

    out = {"as shown": (base, 0), "seed 1": (base, 1), "outputs spread wider": (spread(sigma_output=0.2), 0)}
    if everything:
        out |= {
            "seed 2": (base, 2),
            "outputs spread less": (spread(sigma_output=-0.2), 0),
            "prompts spread wider": (spread(sigma_prompt=0.25), 0),
            "prompts spread less": (spread(sigma_prompt=-0.25), 0),
        }
    return out


def requests_for(seconds: float, rate: float, lengths: str | LengthModel, seed: int = 0) -> Workload:
    """A Poisson workload whose arrivals last a little longer than `seconds`."""
    expected = seconds * rate
    return independent(int(expected + 4 * expected**0.5) + 1, rate, lengths, seed=seed)


def run_named(runs: Iterable[tuple[Any, SimConfig, Workload]], progress: bool) -> dict[Any, Result]:
    """Results by name, all runs in one sweep."""
    wanted = list(runs)
    results = sweep([(config, workload) for _, config, workload in wanted], progress=progress)
    return {name: result for (name, _, _), result in zip(wanted, results, strict=True)}
