"""A plan as a picture."""

from __future__ import annotations

from typing import Any

from pagedjax.errors import ConfigError
from pagedjax.planning.plan import SCHEMES, Plan

_COLOURS = ("#8c8c8c", "#b5a27a", "#c9772d", "#7a9cc6", "#1f5fa8", "#0b2f57", "#4a8f4a")


def plot_plan(plan: Plan, path: str) -> None:
    """Writes a PNG: bars of concurrent requests by scheme, one group of bars for each request shape.

    Raises:
      ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure  # without pyplot: no display is looked for, no state is left
    except ModuleNotFoundError:
        raise ConfigError("--plot: needs matplotlib: pip install 'pagedjax[plots]'") from None
    schemes = list(plan.lines[0].requests)
    figure = Figure(figsize=(max(8.0, 2.4 * len(plan.lines) + 2), 5.0), layout="constrained")
    axes: Any = figure.add_subplot()
    width = 0.84 / len(schemes)
    for i, scheme in enumerate(schemes):
        values = [line.requests[scheme] for line in plan.lines]
        places = [x + (i - (len(schemes) - 1) / 2) * width for x in range(len(plan.lines))]
        label = SCHEMES.get(scheme, "pages, with the shared prefix held once")
        bars = axes.bar(places, values, width, color=_COLOURS[i], label=label)
        axes.bar_label(bars, [f"{v:,}" for v in values], fontsize=7, padding=2)
    axes.set_xticks(range(len(plan.lines)), [f"{line.prompt:,} in\n{line.output:,} out" for line in plan.lines])
    axes.set_ylabel("concurrent requests")
    counts = [n for line in plan.lines for n in line.requests.values()]
    if max(counts) > 50 * max(min(counts), 1):  # small bars would not be seen on a linear axis
        axes.set_yscale("symlog", linthresh=1)
        axes.set_ylim(0, 2.2 * max(counts))
    else:
        axes.margins(y=0.1)
    axes.set_title(
        f"{plan.model}: {plan.cache_bytes / 2**30:.2f} GiB of KV cache, {plan.bytes_per_token / 1024:g} KiB a token, "
        f"pages of {plan.page_size}",
        fontsize=10,
    )
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", fontsize=7.5, ncols=2, frameon=False)
    try:
        figure.savefig(path, dpi=150, format="png")
    except OSError as error:
        raise ConfigError(f"--plot={path}: {error.strerror}") from None
