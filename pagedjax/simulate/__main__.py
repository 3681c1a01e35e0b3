"""Simulates serving systems in virtual time.

python -m pagedjax.simulate --config=configs/simulate/sharegpt.py --output=out.json --plots=out
python -m pagedjax.simulate --config.workload.rate=2 --config.system.scheme=orca_max
python -m pagedjax.simulate --config.sweep.rates=0.5,1,2 --config.sweep.schemes=paged,orca_oracle

Times are those of a model of costs, not measured (see pagedjax.simulate.cost).
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sys
import time
from typing import Any

import jax
from absl import app, flags
from ml_collections import config_dict, config_flags

from pagedjax.flags import fail
from pagedjax.simulate.command import default_command_config, freeze, make_runs
from pagedjax.simulate.plots import plot_results
from pagedjax.simulate.result import Result
from pagedjax.simulate.run import sweep

_OUTPUT = flags.DEFINE_string("output", "", "JSON file to write the figures of all runs to")
_SERIES = flags.DEFINE_bool("series", False, "write the series over time into the JSON file, too")
_PLOTS = flags.DEFINE_string("plots", "", "folder to write pictures to")

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


def report(config: config_dict.ConfigDict, *, output: str, plots: str, with_series: bool) -> None:
    """Simulate, print the table, write the files that are named. ConfigError, ValueError: what cannot be simulated."""
    runs = make_runs(freeze(config))
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
    if output:
        path = pathlib.Path(output)
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {"config": json.loads(config.to_json_best_effort()), "seconds": seconds}
        document["runs"] = [record(label, result, with_series) for label, result in zip(labels, results, strict=True)]
        path.write_text(json.dumps(document, indent=1))
    if plots:
        for path in plot_results(labels, results, pathlib.Path(plots)):
            print(path, file=sys.stderr)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}; options start with --")
    if _PLOTS.value and importlib.util.find_spec("matplotlib") is None:
        fail("--plots: needs matplotlib, pip install 'pagedjax[plots]'")
    try:
        report(flags.FLAGS.config, output=_OUTPUT.value, plots=_PLOTS.value, with_series=_SERIES.value)
    except ValueError as e:
        fail(e)


def define_config(arguments: list[str], values: flags.FlagValues = flags.FLAGS) -> None:
    """Define --config: a file where one is given, else the defaults, so that single options can be set either way."""
    names = [argument.lstrip("-").partition("=")[0] for argument in arguments]
    if "config" in names:
        config_flags.DEFINE_config_file("config", None, "a Python file with get_config()", values, sys_argv=arguments)
    else:
        default = default_command_config()
        config_flags.DEFINE_config_dict("config", default, "the configuration", values, sys_argv=arguments)


if __name__ == "__main__":
    define_config(sys.argv[1:])
    app.run(main)
