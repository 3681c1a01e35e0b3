"""The report's figures, with matplotlib (pip install 'pagedjax[plots]'). Axes have units, lines and bars their names beside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from pagedjax.simulate.report import paper

COLOURS = {
    "paged": "#1f6f8b",
    "orca_oracle": "#5b8c5a",
    "orca_pow2": "#c98a1b",
    "orca_max": "#b5442e",
    "faster_transformer": "#6c6f7d",
    "cached": "#7fb7c9",
}
PARTS = {
    "tokens": ("tokens", "#4c9f70"),
    "reserved": ("reserved, will be filled", "#f2c14e"),
    "internal": ("never filled", "#d1495b"),
    "external": ("free or rounded up", "#b9c2ce"),
}
_SHORT = {
    "orca_max": "Orca (Max)",
    "orca_pow2": "Orca (Pow2)",
    "orca_oracle": "Orca (Oracle)",
    "paged": "pages",
    "faster_transformer": "FasterTransformer",
}


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def _bare(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def waste(shown: Mapping[str, Mapping[str, float]], printed: Mapping[str, Mapping[str, str]]) -> Figure:
    """Figure 2. Args: percent by part and system; the paper's labels."""
    figure = _figure(9, 0.95 * len(shown) + 1.0)
    axes = figure.subplots()
    labels = []
    for i, (scheme, parts) in enumerate(shown.items()):
        theirs = {part: float(text) for part, text in printed[scheme].items()}
        # What has no label is the rest.
        rest = 100 - sum(theirs.values())
        for j, values in enumerate((parts, theirs)):
            y, left = 2.4 * i + j, 0.0
            labels.append((y, f"{_SHORT[scheme]}, ours" if j == 0 else "paper"))
            for part, (_, colour) in PARTS.items():
                width = values.get(part, 0.0)
                axes.barh(
                    y, width, left=left, color=colour, alpha=1.0 if j == 0 else 0.6, height=0.9, edgecolor="white"
                )
                if width >= 4:
                    axes.text(left + width / 2, y, f"{width:.1f}", ha="center", va="center", fontsize=9)
                left += width
            if j == 1 and scheme == "paged":
                axes.barh(y, rest, left=left, color="#dddddd", height=0.9, edgecolor="white", hatch="//")
                axes.text(100.5, y, f"rest {rest:.1f}, unlabelled", va="center", fontsize=8)
    axes.set_yticks([y for y, _ in labels], [text for _, text in labels])
    axes.set(xlim=(0, 100), xlabel="share of the KV memory, %")
    axes.invert_yaxis()
    handles = [axes.barh([0], [0], color=colour, label=name) for name, colour in PARTS.values()]
    figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False)
    _bare(axes)
    return figure


def batch(
    shown: Mapping[str, Mapping[str, float]], printed: Mapping[str, Mapping[str, str]], always: Mapping[str, float]
) -> Figure:
    """Figure 13. Args: mean number of running requests by system and data set; the paper's labels; rates of all but pages."""
    figure = _figure(9, 3.6)
    for axes, (dataset, by_system) in zip(figure.subplots(1, len(shown)), shown.items(), strict=True):
        for i, (scheme, ours) in enumerate(by_system.items()):
            theirs = float(printed[dataset][scheme])
            axes.bar(i - 0.2, ours, 0.38, color=COLOURS[scheme])
            axes.bar(i + 0.2, theirs, 0.38, color=COLOURS[scheme], alpha=0.4, hatch="//", edgecolor="white")
            axes.text(i - 0.2, ours, f"{ours:.1f}", ha="center", va="bottom", fontsize=8)
            axes.text(i + 0.2, theirs, f"{theirs:.1f}", ha="center", va="bottom", fontsize=8, color="#555555")
        rate = paper.BATCHED_RATE[dataset]
        names = [
            f"{_SHORT[s]}\nat {rate if s == 'paged' else always[dataset]:g}/s".replace(" (", "\n(") for s in by_system
        ]
        axes.set_xticks(range(len(by_system)), names)
        top = max(*by_system.values(), *map(float, printed[dataset].values()))
        axes.set(ylabel="requests running, on average", ylim=(0, 1.25 * top))
        axes.set_title(f"{paper.DATASETS[dataset]}, OPT-13B; the paper's all at {rate:g} requests/s", fontsize=10)
        _bare(axes)
    handles = [
        Patch(color="#777777", label="ours: pages modelled, the others simulated"),
        Patch(facecolor="#777777", alpha=0.4, hatch="//", edgecolor="white", label="paper"),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=2, frameon=False)
    return figure


def rates(lines: Mapping[tuple[str, str], Mapping[str, Any]], threshold: float, grids: Mapping[Any, Any]) -> Figure:
    """Figure 12. Args: `rates.Curve` by system and (preset, data set)."""
    presets = list(dict.fromkeys(preset for preset, _ in lines))
    datasets = list(dict.fromkeys(dataset for _, dataset in lines))
    figure = _figure(4.6 * max(len(presets), 2), 3.5 * len(datasets))
    grid = figure.subplots(len(datasets), len(presets), squeeze=False)
    top = 2 * threshold
    for i, dataset in enumerate(datasets):
        for j, preset in enumerate(presets):
            axes, case = grid[i][j], (preset, dataset)
            ends = {scheme: line.sustained(threshold) for scheme, line in lines[case].items()}
            order = sorted(ends, key=lambda scheme: ends[scheme])
            for k, (scheme, line) in enumerate(lines[case].items()):
                colour, tried = COLOURS[scheme], grids[case][scheme]
                axes.plot(line.rates, line.latency, color=colour, marker="o", markersize=2.5, linewidth=1.5)
                y = -0.06 * top * (k + 1)
                axes.plot(tried, [y, y], color=colour, alpha=0.35, linewidth=4, solid_capstyle="butt")
                height = line.at(ends[scheme])
                axes.plot([ends[scheme]], [height], color=colour, marker="o", markersize=7)
                axes.annotate(
                    _SHORT[scheme].replace("FasterTransformer", "FT"),
                    (ends[scheme], height),
                    # Each on a line of its own, as neighbours may be close.
                    xytext=(0, 8 + 11 * order.index(scheme)),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8,
                    color=colour,
                    bbox=dict(facecolor="white", edgecolor="none", alpha=0.7, pad=0.5),
                    arrowprops=dict(arrowstyle="-", color=colour, alpha=0.4, linewidth=0.8),
                )
            axes.axhline(threshold, color="#999999", linewidth=0.8, linestyle=":")
            axes.axhline(0, color="#333333", linewidth=0.8)
            axes.set(ylim=(-0.06 * top * (len(lines[case]) + 1), top), xlim=(0, None))
            axes.set_title(f"{paper.MODELS[preset]}, {paper.DATASETS[dataset]}", fontsize=10)
            axes.set_xlabel("requests a second (below the axis: rates tried in the artifact)", fontsize=8)
            axes.set_ylabel("normalized latency, s/token (modelled)", fontsize=8)
            axes.set_yticks([t for t in (0, 0.25, 0.5, 0.75, 1.0) if t <= top])
            _bare(axes)
    return figure


def sharing(drawn: Mapping[str, Any], real: Mapping[str, Mapping[str, float]] | None) -> Figure:
    """Figure 15. Args: percent saved by width, for beams (least, most); the same of a real run, if there is one."""
    figure = _figure(9, 3.8)
    kinds = {"simulated (beams: least to most possible)": "#1f6f8b", "paper, OPT-13B": "#d8a79c"}
    if real:
        kinds["measured, SmolLM2-135M"] = "#5b8c5a"
    ours, theirs, measured = [*kinds.values(), ""][:3]
    for axes, kind, labels in zip(
        figure.subplots(1, 2), ("parallel", "beam"), (paper.PARALLEL_SAVED, paper.BEAM_SAVED), strict=True
    ):
        for i, (width, value) in enumerate(drawn[kind].items()):
            low, high = (0.0, value) if kind == "parallel" else value
            axes.bar(i - 0.27, high - low, 0.25, bottom=low, color=ours)
            text = f"{high:.1f}" if kind == "parallel" else f"{low:.0f}-{high:.0f}"
            bars = [(-0.27, high, text), (0.0, float(labels[width]), labels[width])]
            axes.bar(i, float(labels[width]), 0.25, color=theirs)
            if real and str(width) in real[kind]:
                axes.bar(i + 0.27, real[kind][str(width)], 0.25, color=measured)
                bars.append((0.27, real[kind][str(width)], f"{real[kind][str(width)]:.1f}"))
            for offset, top, shown in bars:
                axes.text(i + offset, top, shown, ha="center", va="bottom", fontsize=8)
        axes.set_xticks(range(len(drawn[kind])), [str(width) for width in drawn[kind]])
        name = "parallel samples" if kind == "parallel" else "beams"
        axes.set(xlabel=f"{name} of a request (Alpaca)", ylabel="pages saved by sharing, %")
        axes.set_ylim(0, axes.get_ylim()[1] * 1.08)
        _bare(axes)
    handles = [axes.bar([0], [0], color=colour, label=name) for name, colour in kinds.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False)
    return figure


def prefixes(drawn: Mapping[str, Mapping[str, float]]) -> Figure:
    """Figures 16 and 17. Args: requests a second by setting and system."""
    figure = _figure(10, 3.6)
    for axes, (title, by_system) in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn.items(), strict=True):
        for i, (name, rate) in enumerate(by_system.items()):
            scheme = "cached" if name.startswith("with") else name
            axes.barh(i, rate, color=COLOURS[scheme], height=0.7)
            axes.text(rate, i, f" {rate:.2f}", va="center", fontsize=9)
        names = [_SHORT.get(name, f"pages,\n{name}") for name in by_system]
        axes.set_yticks(range(len(names)), names, fontsize=9)
        axes.set(xlabel="requests/s at most (modelled)", xlim=(0, 1.25 * max(by_system.values())))
        axes.set_title(title, fontsize=9)
        axes.invert_yaxis()
        _bare(axes)
    return figure


def page_sizes(drawn: Mapping[tuple[str, str], Mapping[int, float]]) -> Figure:
    """Figures 18b and 19b. Args: normalized latency by page size, for each (data set, preemption)."""
    figure = _figure(9, 3.6)
    for axes, dataset in zip(figure.subplots(1, 2), paper.DATASETS.values(), strict=True):
        for (name, preemption), by_size in drawn.items():
            if name != dataset:
                continue
            sizes, latency = list(by_size), list(by_size.values())
            style = {"recompute": ("#1f6f8b", "-", 8), "swap": ("#c98a1b", "--", -14)}[preemption]
            axes.plot(sizes, latency, color=style[0], linestyle=style[1], marker="o", markersize=4)
            axes.annotate(
                preemption,
                (sizes[-1], latency[-1]),
                xytext=(0, style[2]),
                textcoords="offset points",
                ha="right",
                color=style[0],
                fontsize=9,
            )
        axes.set_xscale("log", base=2)
        ticks = sorted({size for by_size in drawn.values() for size in by_size})
        axes.set_xticks(ticks, [str(t) for t in ticks])
        axes.set(xlabel="tokens in a page", ylabel="normalized latency, s/token (modelled)")
        axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
        axes.set_title(f"{dataset}, OPT-13B", fontsize=10)
        _bare(axes)
    return figure


def preemption(milliseconds: Mapping[str, Mapping[str, float]], tokens: int) -> Figure:
    """Figure 19a, measured. Args: milliseconds by page size and part."""
    figure = _figure(7, 3.6)
    axes = figure.subplots()
    names = list(milliseconds)
    for name, colour, parts in (
        ("compute again", "#1f6f8b", ("recompute",)),
        ("swap out and in", "#c98a1b", ("swap_out", "swap_in")),
    ):
        values = [sum(milliseconds[size][part] for part in parts) for size in names]
        axes.plot(range(len(names)), values, color=colour, marker="o", markersize=4)
        # Where they are furthest apart in the paper: at the smallest pages.
        axes.annotate(name, (0, values[0]), xytext=(8, 7), textcoords="offset points", color=colour)
    axes.set_xticks(range(len(names)), names)
    axes.set(xlabel="tokens in a page", ylabel=f"ms to bring back {tokens} tokens (measured)", ylim=(0, None))
    _bare(axes)
    return figure


def allocation(running: Mapping[str, float], speed: Mapping[str, float], held: Mapping[str, float]) -> Figure:
    """The real engine. Args: requests at once, tokens a second, and percent of slots with a token, by allocation."""
    names = {
        "max_len": "reserve longest",
        "pow2": "reserve power of two",
        "request": "reserve exactly",
        "chunked": "fixed chunks",
        "paged": "pages",
    }
    colours = {
        "max_len": "orca_max",
        "pow2": "orca_pow2",
        "request": "orca_oracle",
        "chunked": "faster_transformer",
        "paged": "paged",
    }
    figure = _figure(10, 3.2)
    titles = (
        "requests at once,\nwhile some wait",
        "output tokens\nper second",
        "% of slots that hold a\ntoken, while some wait",
    )
    for k, (axes, title, values) in enumerate(zip(figure.subplots(1, 3), titles, (running, speed, held), strict=True)):
        for i, (name, value) in enumerate(values.items()):
            axes.barh(i, value, color=COLOURS[colours[name]], height=0.7)
            axes.text(value, i, f" {value:.1f}", va="center", fontsize=9)
        axes.set_yticks(range(len(values)), [names[n] for n in values] if k == 0 else [""] * len(values))
        axes.set(xlabel=f"{title} (measured)", xlim=(0, 1.25 * max(values.values())))
        axes.invert_yaxis()
        _bare(axes)
    return figure
