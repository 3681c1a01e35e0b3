"""Simulates serving systems in virtual time.

usage: python -m pagedjax.simulate [--config=FILE] [--config.section.field=value ...] [--output=FILE] [--plots=FOLDER]

  python -m pagedjax.simulate --config=configs/simulate/sharegpt.py --output=out.json --plots=out
  python -m pagedjax.simulate --config.workload.rate=2 --config.system.scheme=orca_max
  python -m pagedjax.simulate --config.sweep.rates=0.5,1,2 --config.sweep.schemes=paged,orca_oracle

Prints a line for each run, a combination of what config.sweep lists. Times are those of a model of costs, not measured.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import pathlib
import sys
import time
from typing import Any

import jax

from pagedjax.command_line import fail, run
from pagedjax.folders import check_file_target, check_folder_target
from pagedjax.options import option
from pagedjax.simulate.command import SIMULATION, CommandConfig, make_runs
from pagedjax.simulate.plots import plot_results
from pagedjax.simulate.result import Result
from pagedjax.simulate.run import sweep


@dataclasses.dataclass(frozen=True)
class OutputOptions:
    """The flags beside the configuration."""

    output: str = option("", "JSON file to write the figures of all runs to")
    series: bool = option(False, "write the series over time into the JSON file, too")
    plots: str = option("", "folder to write pictures to")


_COLUMNS = (
    ("finished", "finished", "{:d}"),
    ("s/token", "normalized_latency", "{:.4f}"),
    ("first token", "time_to_first_token_mean", "{:.2f}"),
    ("tokens/s", "tokens_per_second", "{:.0f}"),
    ("running", "mean_running", "{:.2f}"),
    ("preempted", "preemptions", "{:d}"),
)


def table(labels: list[dict[str, Any]], results: list[Result]) -> str:
    """A line a run."""
    head = [*labels[0], *(name for name, _, _ in _COLUMNS), "tokens %", "reserved %", "internal %", "external %"]
    lines = [head]
    for label, result in zip(labels, results, strict=True):
        summary = result.summary()
        cells = [str(value) for value in label.values()]
        cells += ["-" if summary[key] is None else form.format(summary[key]) for _, key, form in _COLUMNS]
        cells += ["-" if value is None else f"{100 * value:.1f}" for value in summary["waste"].values()]
        lines.append(cells)
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def record(label: dict[str, Any], result: Result, with_series: bool) -> dict[str, Any]:
    """One run as JSON values."""
    out = {"run": label, **result.summary()}
    if with_series:
        series = result.series().items()
        out["series"] = {name: [None if v != v else round(float(v), 6) for v in values] for name, values in series}
    return out


def report(config: CommandConfig, given: OutputOptions) -> None:
    """Simulate, print the table, write the files that are named. ConfigError, ValueError: what cannot be simulated."""
    runs = make_runs(config)
    started = time.perf_counter()
    results = sweep([(system, workload) for _, system, workload in runs])
    seconds = time.perf_counter() - started
    labels = [label for label, _, _ in runs]
    print(table(labels, results))
    trips, iterations = sum(r.trips for r in results), sum(r.iterations for r in results)
    print(
        f"{len(runs)} runs, {sum(r.seconds for r in results):,.0f} virtual seconds, {iterations:,} iterations in "
        f"{trips:,} trips, {seconds:.1f} s on {jax.default_backend()}",
        file=sys.stderr,
    )
    if given.output:
        document = {"config": dataclasses.asdict(config), "seconds": seconds}
        document["runs"] = [record(label, result, given.series) for label, result in zip(labels, results, strict=True)]
        pathlib.Path(given.output).write_text(json.dumps(document, indent=1))
    if given.plots:
        for path in plot_results(labels, results, pathlib.Path(given.plots)):
            print(path, file=sys.stderr)


def main(config: CommandConfig, given: OutputOptions) -> None:
    if given.plots and importlib.util.find_spec("matplotlib") is None:
        fail("--plots: needs matplotlib, pip install 'pagedjax[plots]'")
    check_file_target("--output", given.output)
    check_folder_target("--plots", given.plots)
    if given.series and not given.output:
        fail("--series: goes into the file that --output names")
    try:
        report(config, given)
    except ValueError as e:
        fail(e)


if __name__ == "__main__":
    run(main, __doc__ or "", [OutputOptions], schema=SIMULATION)
