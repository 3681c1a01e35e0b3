"""Tests the claims of the PagedAttention paper: a page, a table and JSON in a folder.

usage: python -m pagedjax.simulate.report [--quick] [--output=FOLDER]

  python -m pagedjax.simulate.report --output=reproduction          # some minutes
  python -m pagedjax.simulate.report --quick --output=reproduction  # about a minute or two; one model, short runs

Nothing is measured here. Figures of the real engine are read from benchmarks/*.json, where they are.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import time

import jax

from pagedjax.command_line import fail, run
from pagedjax.folders import cache_folder, check_folder_target
from pagedjax.options import option
from pagedjax.simulate.report.build import build
from pagedjax.simulate.report.page import count_verdicts, write
from pagedjax.simulate.report.section import FULL, QUICK, TINY, Scale


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """The flags."""

    output: str = option("reproduction", "folder to write to; made if it is not there")
    quick: bool = option(False, "one model, short runs, fewer variants: verdicts may differ from the full form")
    benchmarks: str = option("benchmarks", "folder of the measured figures; what is not there is left out")
    tiny: bool = option(False, "next to nothing: whether it runs at all; its numbers mean nothing")


def _form(scale: Scale) -> str:
    if scale.name == "full":
        return "This is the full form."
    if scale.name == "quick":
        return (
            "This is the quick form: one model, short runs. What is simulated, figures and verdicts, can differ much from the "
            "full form."
        )
    return "This is a trial of the program: the numbers that are simulated mean nothing."


def main(given: ReportOptions) -> None:
    scale = TINY if given.tiny else QUICK if given.quick else FULL
    folder = pathlib.Path(given.benchmarks)
    check_folder_target("--output", given.output)
    started = time.perf_counter()
    # Most of a run is compilation; the next one finds it done.
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
    try:
        sections = build(scale, folder if folder.is_dir() else None)
        facts = {
            "form": scale.name,
            "jax": jax.__version__,
            "backend": jax.default_backend(),
            "seconds": time.perf_counter() - started,
        }
        written = write(sections, pathlib.Path(given.output), _form(scale), facts)
    except (ValueError, OSError) as e:
        fail(e)
    for verdict, count in count_verdicts(sections):
        print(f"{count:4d}  {verdict.value}")
    print(f"{time.perf_counter() - started:.0f} s; open {written[0]}", file=sys.stderr)


if __name__ == "__main__":
    run(main, __doc__ or "", [ReportOptions], schema=None)
