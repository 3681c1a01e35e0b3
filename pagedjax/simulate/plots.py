"""Pictures of results, with matplotlib (pip install 'pagedjax[plots]')."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from pagedjax.simulate.result import WASTE, Result

_COLOURS = {"tokens": "#4c9f70", "reserved": "#f2c14e", "internal": "#d1495b", "external": "#8d99ae"}
MAX_SERIES = 12
"""Runs that are drawn over time; more are not told apart."""


def plot_results(
    labels: Sequence[dict[str, Any]], results: Sequence[Result], folder: pathlib.Path
) -> list[pathlib.Path]:
    """Write waste by kind, requests over time, and latency over rate where rates differ, as PNG files.

    Args:
      labels: what is special about each run; `rate` is the x axis of the latency.
      folder: made if it is not there.

    Raises:
      ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    names = [", ".join(f"{k}={v}" for k, v in label.items()) or result.config.scheme
             for label, result in zip(labels, results, strict=True)]  # fmt: skip
    written = []

    def save(figure: Figure, name: str) -> None:
        figure.savefig(folder / name, dpi=120, bbox_inches="tight")
        written.append(folder / name)

    figure = Figure(figsize=(8, 1 + 0.3 * len(names)))
    axes = figure.subplots()
    left = np.zeros(len(names))
    for part in WASTE:
        width = np.array([100 * result.waste()[part] for result in results])
        axes.barh(names, width, left=left, color=_COLOURS[part], label=part)
        left += width
    axes.set(xlabel="share of the KV memory, %, averaged over iterations", xlim=(0, 100))
    axes.invert_yaxis()
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    save(figure, "waste.png")

    figure = Figure(figsize=(8, 6))
    top, bottom = figure.subplots(2, sharex=True)
    for name, result in list(zip(names, results, strict=True))[:MAX_SERIES]:
        series = result.series()
        top.plot(series["time"], series["running"], label=name, linewidth=1)
        bottom.plot(series["time"], 100 * series["tokens"], linewidth=1)
    top.set(ylabel="requests running")
    bottom.set(ylabel="slots that hold a token, %", xlabel="virtual time, s", ylim=(0, 100))
    top.legend(fontsize="small", frameon=False)
    save(figure, "over_time.png")

    if len({label.get("rate") for label in labels}) > 1:
        figure = Figure(figsize=(8, 5))
        axes = figure.subplots()
        curves: dict[str, list[tuple[float, float]]] = {}
        for label, result in zip(labels, results, strict=True):
            curve = ", ".join(f"{k}={v}" for k, v in label.items() if k != "rate") or result.config.scheme
            curves.setdefault(curve, []).append((label["rate"], result.normalized_latency))
        for curve, points in curves.items():
            axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=curve)
        axes.set(xlabel="requests a second", ylabel="normalized latency, s/token (modelled)", ylim=(0, 1))
        axes.legend(fontsize="small", frameon=False)
        save(figure, "latency.png")
    return written
