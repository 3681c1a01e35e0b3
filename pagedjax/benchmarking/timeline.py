"""A run as a picture: each request's wait and tokens over time, and how much ran at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pagedjax.benchmarking.metrics import chunk_times, concurrency, tokens_by_second
from pagedjax.benchmarking.outcome import Outcome
from pagedjax.errors import ConfigError

_WAIT, _FAILED = "#c8c8c8", "#202020"
_SPEEDS = ("#2e7d4f", "#e0a030", "#c0504d")  # gaps below the first limit, below the second, above


def plot_timeline(outcomes: Sequence[Outcome], limits: tuple[float, float], path: str) -> None:
    """Writes a PNG.

    Above, a bar for each request: grey until its first token, then coloured by the gaps between its chunks. Below, the
    requests in flight, and output tokens per second.

    Args:
      limits: milliseconds; gaps up to the first are green, up to the second yellow, longer ones red.

    Raises:
      ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    figure_class = require_matplotlib()
    height = min(4 + 0.09 * len(outcomes), 14.0)
    figure = figure_class(figsize=(11, height), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(max(height - 2.6, 2), 2))
    _draw_requests(above, outcomes, limits)
    _draw_load(below, outcomes)
    try:
        figure.savefig(path, dpi=130, format="png")
    except OSError as error:
        raise ConfigError(f"--plot_timeline={path}: {error.strerror}") from None


def require_matplotlib() -> Any:
    """matplotlib's Figure: without pyplot, no display is looked for and no state is left. ConfigError where there is none."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigError("--plot_timeline: needs matplotlib: pip install 'pagedjax[plots]'") from None
    return Figure


def _draw_requests(axes: Any, outcomes: Sequence[Outcome], limits: tuple[float, float]) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    boxes: dict[str, list[np.ndarray]] = {colour: [] for colour in (_WAIT, _FAILED, *_SPEEDS)}
    order = sorted(range(len(outcomes)), key=lambda i: outcomes[i].start)
    for row, i in enumerate(order):
        outcome = outcomes[i]
        if not outcome.ok:
            boxes[_FAILED].append(_box(row, outcome.start, outcome.start + outcome.latency))
            continue
        boxes[_WAIT].append(_box(row, outcome.start, outcome.start + outcome.ttft))
        for begin, end, speed in _stretches(outcome, limits):
            boxes[_SPEEDS[speed]].append(_box(row, begin, end))
    for colour, found in boxes.items():
        axes.add_collection(PolyCollection(found, facecolors=colour, edgecolors="none"))
    labels = (f"gap up to {limits[0]:g} ms", f"up to {limits[1]:g} ms", "longer")
    handles = [Patch(color=_WAIT, label="until the first token")]
    handles += [Patch(color=colour, label=label) for colour, label in zip(_SPEEDS, labels, strict=True)]
    if boxes[_FAILED]:
        handles.append(Patch(color=_FAILED, label="failed"))
    axes.set_ylim(len(outcomes), 0)
    axes.set_ylabel("requests, by the time they were sent")
    axes.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5, fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _stretches(outcome: Outcome, limits: tuple[float, float]) -> list[tuple[float, float, int]]:
    """(begin, end, speed class) of runs of gaps of one class, so that there are few boxes."""
    times = chunk_times(outcome)
    if len(times) < 2:
        return []
    classes = np.searchsorted(np.asarray(limits) / 1000, np.diff(times), side="left")
    cuts = np.concatenate([[0], np.flatnonzero(np.diff(classes)) + 1, [len(classes)]])
    pairs = zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)
    return [(float(times[a]), float(times[b]), int(classes[a])) for a, b in pairs]


def _box(row: int, begin: float, end: float) -> np.ndarray:
    return np.array([(begin, row + 0.1), (end, row + 0.1), (end, row + 0.9), (begin, row + 0.9)])


def _draw_load(axes: Any, outcomes: Sequence[Outcome]) -> None:
    times, running = concurrency(outcomes)
    axes.step(times, running, where="post", color="#1f5fa8", linewidth=1.2)
    axes.set_ylabel("requests in flight", color="#1f5fa8")
    axes.set_xlabel("seconds from the start")
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, max(float(times[-1]), 1e-3) * 1.01)
    tokens = tokens_by_second([o for o in outcomes if o.ok])
    other = axes.twinx()
    other.step(np.arange(len(tokens) + 1), [*tokens, 0.0], where="post", color="#c9772d", linewidth=1.0)
    other.set_ylabel("output tokens in a second", color="#c9772d")
    other.set_ylim(bottom=0)
    axes.spines["top"].set_visible(False)
    other.spines["top"].set_visible(False)
