"""Makes all sections, in order."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from pagedjax.simulate.report import arithmetic, headlines, measured, memory, page_sizes, prefixes, rates, samples
from pagedjax.simulate.report.section import Scale, Section


def _paged_capacity(numbers: dict[str, Any]) -> dict[str, float]:
    """What pages take at most on OPT-13B, by data set."""
    by_case = {case.partition(" "): systems["paged"]["capacity"] for case, systems in numbers["rates"].items()}
    return {dataset: most for (preset, _, dataset), most in by_case.items() if preset == page_sizes.PRESET}


def build(scale: Scale, benchmarks: pathlib.Path | None = None, *, progress: bool = True) -> list[Section]:
    """All sections.

    Args:
      scale: how much is simulated.
      benchmarks: folder of measured figures, if there is one.
      progress: show bars, one over the parts and one over the requests of the part.

    Raises:
      ValueError: a benchmark file that is none.
    """
    from_files = measured.Measured(benchmarks)
    last = measured.section(from_files)  # first, so that a bad file is named before minutes of work
    numbers: dict[str, Any] = {}
    steps: list[tuple[str, Callable[[], list[Section]]]] = [
        ("sizes", lambda: [arithmetic.section()]),
        ("figures 2 and 13", lambda: memory.sections(scale, progress)),
        ("figure 12", lambda: [rates.section(scale, progress)]),
        ("figures 14 and 15", lambda: [samples.section(scale, progress, from_files)]),
        ("figures 16 and 17", lambda: [prefixes.section(scale, progress)]),
        ("figures 18 and 19", lambda: [page_sizes.section(scale, progress, _paged_capacity(numbers))]),
        ("claims from elsewhere", lambda: [headlines.section(scale, progress, numbers)]),
    ]
    sections: list[Section] = []
    with tqdm(steps, unit="part", disable=not progress) as bar:
        for name, make in bar:
            bar.set_description(f"Reproducing {name}")
            for section in make():
                sections.append(section)
                numbers |= section.numbers
    return [*sections, last]
