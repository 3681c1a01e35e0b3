"""What was measured on the real engine and kernels: the files in benchmarks/, those that are there."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from pagedjax.simulate.report import drawing, paper
from pagedjax.simulate.report.claim import Claim, Verdict, holds, near, unchecked, within
from pagedjax.simulate.report.section import Figure, Section

ALLOCATIONS = ("max_len", "pow2", "request", "chunked", "paged")


@dataclasses.dataclass(frozen=True)
class Measured:
    """A folder of benchmark files; none of them needs to be there.

    Attributes:
      folder: None: nothing was measured.
    """

    folder: pathlib.Path | None = None

    def read(self, name: str) -> dict[str, Any] | None:
        """A file's content; None if it is not there. ValueError if it is not JSON."""
        path = self.folder / f"{name}.json" if self.folder else None
        if path is None or not path.is_file():
            return None
        try:
            return json.loads(path.read_text())
        except json.JSONDecodeError as e:
            raise ValueError(f"{path}: not JSON: {e}") from None

    def sharing(self) -> dict[str, dict[str, float]] | None:
        """Percent of pages saved by kind and width (scripts/bench_sharing.py)."""
        data = self.read("sharing")
        return data["percent_saved"] if data else None


def _where(data: dict[str, Any]) -> str:
    return f"{data.get('machine', 'unknown machine')}; {data.get('command', '')}"


def _parallel(data: dict[str, Any]) -> list[Claim]:
    claims = []
    for width, printed in paper.PARALLEL_SAVED.items():
        ours = data["percent_saved"]["parallel"].get(str(width))
        if ours is not None:
            claims.append(
                near(
                    "Fig. 15a",
                    f"Parallel sampling, {width} samples: pages saved, real run",
                    printed,
                    ours,
                    (0.9 * ours, 1.1 * ours),
                    kind="measured",
                    unit=" %",
                    than=0.0,
                    note="default model, lengths geometric with Alpaca's means, one request at "
                    "a time beside others of a few; a tenth off is allowed",
                )
            )
    return claims


def _layout(data: dict[str, Any]) -> Claim:
    ratios = {name: times["scattered"] / times["contiguous"] for name, times in data["milliseconds"].items()}
    shown = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items())
    low, high = paper.KERNEL_SLOWDOWN
    at_16 = [ratio for name, ratio in ratios.items() if name.endswith("page 16")]
    inside = bool(at_16) and all(low <= ratio <= high for ratio in at_16)
    return holds(
        "Fig. 18a",
        "Paging slows the attention kernel",
        f"{low:.2f}x to {high:.2f}x",
        shown,
        inside,
        partly=min(ratios.values()) > 1.0,
        kind="measured",
        rule=f"pages of 16 within {low} to {high}",
        note="another comparison: our kernel over scattered against adjoining pages, on a CPU; "
        "the paper compares two kernels on a GPU. " + _where(data),
    )


def _preemption(data: dict[str, Any]) -> list[Claim]:
    """Figure 19a on our engine (scripts/bench_preemption.py)."""
    by_size = {int(size): figures for size, figures in data["milliseconds"].items()}
    again = {size: f["recompute"] for size, f in by_size.items()}
    moved = {size: f["swap_out"] + f["swap_in"] for size, f in by_size.items()}
    shown = "; ".join(f"page {s}: {again[s]:.0f} and {moved[s]:.0f}" for s in by_size)
    where = f"{data['tokens']} tokens of {data.get('model', 'the default model')}. {_where(data)}"
    flat = max(again.values()) / min(again.values())
    smallest, largest = min(by_size), max(by_size)
    return [
        holds(
            "Fig. 19a",
            "Recomputation takes as long whatever the page size",
            "flat",
            f"recompute and swap, ms: {shown}",
            flat <= 1.25,
            kind="measured",
            mark="~",
            rule=f"slowest over fastest is {flat:.2f}, at most 1.25",
            note=where,
        ),
        holds(
            "Fig. 19a",
            "Swapping is dearest for the smallest pages",
            "about 4x from page size 1 to large",
            f"page {smallest}: {moved[smallest]:.0f} ms, page {largest}: {moved[largest]:.0f} ms",
            moved[smallest] > 1.5 * moved[largest],
            partly=moved[smallest] > moved[largest],
            kind="measured",
            mark="~",
            rule="smallest over largest is above 1.5",
            note="host and device are the same memory on a CPU",
        ),
        holds(
            "Sect. 7.3",
            "Recomputation costs at most 20 % more than swapping",
            "never above 20 % of swapping's latency, as printed",
            f"slowest case {max(again[s] / moved[s] for s in by_size):.2f}x",
            all(again[s] <= 1.2 * moved[s] for s in by_size),
            kind="measured",
            rule="recomputation over swapping is at most 1.2 for each page size",
            note="as printed, it contradicts the plot; read as 'at most 20 % slower'. On a CPU "
            "arithmetic is dear and copies are cheap",
        ),
    ]


def _against_longest(runs: dict[str, Any], where: str) -> list[Claim]:
    """Pages against reservation of the longest sequence."""
    pages, longest = runs["paged"], runs["max_len"]
    slow = "on a CPU a larger batch brings less than on a GPU. "
    table: list[tuple[str, tuple[float, float], str, float, str, float, str]] = [
        (
            "requests at once, pages over reservation of the longest",
            (2, 4),
            "2x to 4x",
            pages["mean_running"] / longest["mean_running"],
            "x",
            1.0,
            where,
        ),
        (
            "throughput, pages over reservation of the longest",
            (2, 4),
            "2x to 4x",
            pages["output_tokens_per_s"] / longest["output_tokens_per_s"],
            "x",
            1.0,
            slow + where,
        ),
        (
            "slots that hold a token while requests wait, pages",
            (95, 100),
            "above 95 %",
            100 * pages["shares"]["tokens"],
            " %",
            50.0,
            where,
        ),
        (
            "slots wasted while requests wait, reservation of the longest",
            (60, 80),
            "60 % to 80 %",
            100 - 100 * longest["shares"]["tokens"],
            " %",
            50.0,
            where,
        ),
    ]
    return [
        within(
            "Seed",
            f"Real engine: {what}",
            span,
            ours,
            kind="measured",
            unit=unit,
            mark="seed",
            shown=shown,
            than=than,
            note=note,
        )
        for what, span, shown, ours, unit, than, note in table
    ]


def _allocation(data: dict[str, Any]) -> tuple[list[Claim], Figure]:
    """The real engine under five allocations (scripts/bench_allocation.py)."""
    runs = {name: data["runs"][name] for name in ALLOCATIONS if name in data["runs"]}
    setting = data.get("setting", {})
    where = f"{setting.get('requests', '?')} requests in {setting.get('pool_tokens', '?')} slots. {_where(data)}"
    claims = _against_longest(runs, where) if {"max_len", "paged"} <= runs.keys() else []
    same = [run["same_answers"] for run in runs.values() if "same_answers" in run]
    if setting.get("requests") and same:
        num = setting["requests"]
        claims.append(
            holds(
                "Seed",
                "Real engine: the answers are the same, however memory is handed out",
                "all",
                f"{min(same)} of {num} at least",
                all(count == num for count in same),
                partly=min(same) > 0.9 * num,
                kind="measured",
                mark="seed",
                note="in bfloat16 tokens with a rival as likely up to rounding may differ",
            )
        )
    figure = drawing.allocation(
        {name: run["mean_running"] for name, run in runs.items()},
        {name: run["output_tokens_per_s"] for name, run in runs.items()},
        {name: 100 * run["shares"]["tokens"] for name, run in runs.items()},
    )
    caption = "The real engine, by how memory is handed out."
    return claims, Figure("allocation", caption, figure)


def section(measured: Measured) -> Section:
    """All files that are there; those that are not are named."""
    claims: list[Claim] = []
    figures: list[Figure] = []
    missing = []
    readers: dict[str, Any] = {
        "sharing": lambda data: (_parallel(data), None),
        "layout": lambda data: ([_layout(data)], None),
        "preemption": lambda data: (
            _preemption(data),
            Figure(
                "preemption",
                "Milliseconds to bring a sequence back, measured on our engine.",
                drawing.preemption(data["milliseconds"], data["tokens"]),
            ),
        ),
        "allocation": _allocation,
    }
    for name, reader in readers.items():
        data = measured.read(name)
        if data is None:
            missing.append(name)
            claims.append(
                unchecked(
                    "-",
                    f"What scripts/bench_{name}.py measures",
                    "-",
                    f"benchmarks/{name}.json is not there",
                    mark="seed",
                )
            )
            continue
        try:
            found, figure = reader(data)
        except (KeyError, TypeError, ZeroDivisionError) as e:
            raise ValueError(f"{name}.json: not a file of scripts/bench_{name}.py: {e!r}") from None
        claims += found
        figures += [figure] if figure else []
    text = (
        "Read from benchmarks/*.json, which scripts/bench_*.py write; nothing is measured while "
        "this report is made. A CPU and a model "
        "of 135 million parameters are not what the paper had: directions can be compared, sizes hardly."
    )
    if missing:
        text += f" Not there: {', '.join(f'{name}.json' for name in missing)}."
    assert all(claim.kind == "measured" or claim.verdict == Verdict.UNCHECKED for claim in claims)
    return Section("Measured on the real engine", text, tuple(claims), tuple(figures))
