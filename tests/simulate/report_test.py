"""The reproduction report: verdicts, what is exact, what is read from benchmark files, and the page as a whole."""

import dataclasses
import json
import math
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from pagedjax.pages.baselines import reservation
from pagedjax.simulate import Result
from pagedjax.simulate.report import (
    QUICK,
    TINY,
    Claim,
    Verdict,
    arithmetic,
    build,
    drawing,
    exact,
    headlines,
    holds,
    measured,
    near,
    paper,
    systems,
    unchecked,
    within,
)
from pagedjax.simulate.report.page import write
from pagedjax.simulate.report.rates import Curve, capacity_of
from pagedjax.simulate.state import CHANNELS

ROOT = pathlib.Path(__file__).parents[2]


# Verdicts


@pytest.mark.parametrize(
    ("printed", "ours", "verdict"),
    [
        ("8.9", 8.8505, Verdict.EXACT),
        ("8.9", 8.8499, Verdict.NOT),
        ("7.00", 7.004, Verdict.EXACT),
        ("7.00", 7.006, Verdict.NOT),
        ("983", 983, Verdict.EXACT),
        ("983", math.nan, Verdict.NOT),
    ],
)
def test_exact_is_every_printed_digit(printed, ours, verdict):
    claim = exact("Fig.", "x", printed, ours, kind="computed")
    assert claim.verdict == verdict
    # What differs is shown with a digit more, or it would look equal.
    assert (claim.ours == claim.paper) == (verdict == Verdict.EXACT)


@pytest.mark.parametrize(
    ("printed", "ours", "spread", "than", "verdict"),
    [
        ("9.81", 9.5, (9.5, 9.80), None, Verdict.NOT),
        ("9.81", 9.5, (9.5, 9.806), None, Verdict.REPRODUCED),  # half a unit of the last printed digit is added
        ("9.8", 9.5, (9.5, 9.76), None, Verdict.REPRODUCED),
        ("9.81", 9.81, (0.0, 1.0), None, Verdict.REPRODUCED),  # ours is one of the variants
        ("9.81", 9.5, (9.0, 9.5), 7.0, Verdict.DIRECTION),
        ("9.81", 6.5, (6.0, 6.9), 7.0, Verdict.NOT),
        ("9.81", 7.0, (7.0, 7.0), 7.0, Verdict.NOT),
        ("9.81", math.nan, (math.nan, math.nan), 7.0, Verdict.NOT),
    ],
)
def test_near_allows_what_the_variants_span(printed, ours, spread, than, verdict):
    assert near("Fig.", "x", printed, ours, spread, kind="simulated", than=than).verdict == verdict


@pytest.mark.parametrize(
    ("paper_range", "ours", "than", "verdict"),
    [
        ((1.7, 2.7), 1.7, 1.0, Verdict.REPRODUCED),
        ((1.7, 2.7), 1.69, 1.0, Verdict.DIRECTION),
        ((1.7, 2.7), 3.5, 1.0, Verdict.DIRECTION),
        ((1.7, 2.7), 0.9, 1.0, Verdict.NOT),
        ((1.7, 2.7), 0.9, None, Verdict.NOT),
        ((0, 4), 30.0, 50.0, Verdict.DIRECTION),
        ((0, 4), 60.0, 50.0, Verdict.NOT),
        ((0.8, 1.25), 1.4, 1.0, Verdict.NOT),  # a range on both sides has no direction
        ((2, 4), math.nan, 1.0, Verdict.NOT),
        ((2, math.inf), 100.0, 1.0, Verdict.REPRODUCED),
    ],
)
def test_within_a_range(paper_range, ours, than, verdict):
    assert within("Sect.", "x", paper_range, ours, kind="modelled", than=than).verdict == verdict


def test_statements_and_what_cannot_be_checked():
    assert holds("", "x", "", "", True, kind="modelled", partly=True).verdict == Verdict.REPRODUCED
    assert holds("", "x", "", "", False, kind="modelled", partly=True).verdict == Verdict.DIRECTION
    assert holds("", "x", "", "", False, kind="modelled").verdict == Verdict.NOT
    assert unchecked("", "x", "", "why").verdict == Verdict.UNCHECKED
    with pytest.raises(ValueError, match=r"mark: must be one of P, AE, .*got 'X'"):
        holds("", "x", "", "", True, kind="modelled", mark="X")
    with pytest.raises(ValueError, match=r"kind: must be one of computed, .*got 'guessed'"):
        holds("", "x", "", "", True, kind="guessed")


# What is exact


@pytest.fixture(scope="module")
def sizes():
    return arithmetic.section()


def test_sizes_and_worked_examples(sizes):
    claims = {claim.what: claim for claim in sizes.claims}
    wrong = {what: claim.verdict for what, claim in claims.items() if claim.verdict == Verdict.NOT}
    # The paper's own oddity: 175 billion parameters of two bytes are 350 GB.
    assert list(wrong) == ["Parameters of OPT-175B in 16 bits"]
    assert claims["Token slots of OPT-66B in 21 GiB"].verdict == Verdict.REPRODUCED  # 21 is rounded
    exactly = [what for what, claim in claims.items() if claim.verdict == Verdict.EXACT]
    assert {"Token slots of OPT-13B in 12 GiB", "Token slots of OPT-175B in 264 GiB"} < set(exactly)
    assert {"Request A: slots of 2048 that are never used", "Request B: slots of 512 that are never used"} < set(
        exactly
    )
    (common,) = [claim for what, claim in claims.items() if "2,000-token" in what]
    assert common.ours.startswith("225 pages of 16: 125 for the prompt and 100 for one token each, instead of 12,600")
    assert common.verdict == Verdict.REPRODUCED


def test_the_ratio_of_10_20_50_is_one_of_lengths():
    assert headlines.arithmetic().verdict == Verdict.REPRODUCED
    assert "410 tokens on average" in headlines.arithmetic().ours


def test_where_a_curve_crosses_a_threshold():
    curve = Curve(capacity=1.0, rates=(0.5, 1.0, 1.5), latency=(0.1, 0.3, 0.7))
    assert curve.crossing(0.5) == pytest.approx(1.25)
    assert curve.sustained(0.5) == 1.0  # what it takes at most
    assert curve.sustained(0.2) == pytest.approx(0.75)
    assert math.isinf(curve.crossing(2.0))
    assert curve.at(1.25) == pytest.approx(0.5)
    assert math.isnan(curve.crossing(0.05))


# The page


def stand_in(config, workload):
    """A result such as a simulation gives, from queueing arithmetic: the sections are tested, not the simulator."""
    n, num = config.samples, workload.num_requests
    slots = config.total_pages * config.page_size
    if config.family == "buddy":
        asked = reservation(config.reservation, workload.prompt, workload.output, config.max_model_len)
        room = float((2 ** np.ceil(np.log2(np.maximum(asked, 16)))).mean()) * n
    else:
        room = float((workload.prompt + n * (workload.output / 2 + config.page_size / 2)).mean())
    running = max(1.0, min(config.max_running, slots // room))
    service = workload.output * (0.02 + 0.0001 * running)
    most = running / float(service.mean())
    end = np.maximum(workload.arrival, np.arange(num) / most) + service
    seconds = min(config.end, float(end.max()))
    finished, width = end <= seconds, seconds / 10
    held = float((workload.prompt + n * workload.output / 2).mean()) * running / slots
    per_bin = dict.fromkeys(CHANNELS, 0.0) | {"seconds": width, "iterations": 100.0, "running": running * width}
    per_bin |= {"tokens": 100 * held, "reserved": 2.0, "internal": 1.0, "mapped": 100.0, "distinct": 100.0 - 3 * n}
    per_bin |= {"generated": float(workload.output.mean()) * most * width}
    return Result(
        config=config,
        workload=workload,
        finished=finished,
        first_token=end - service - workload.arrival + 0.1,
        latency=end - workload.arrival,
        first_admitted=np.arange(num),
        first_iteration=np.arange(num),
        last_iteration=np.arange(num) + 1,
        preemptions=np.arange(num) % 2,
        cached=np.where(np.arange(num) > 0, workload.prefix_tokens // 16 * 16, 0) * config.prefix_caching,
        seconds=seconds,
        iterations=1000,
        trips=100,
        swapped_out=0,
        swapped_in=0,
        recomputed=0,
        bin_seconds=width,
        bins={name: np.full(10, value) for name, value in per_bin.items()},
    )


@pytest.fixture
def no_simulator(monkeypatch, sizes):
    """Compiling the programs of a whole report takes minutes; the notebook's test runs two of them."""
    seen = []

    def sweep(runs, progress):
        seen.extend(runs)
        return [stand_in(*run) for run in seen[-len(runs) :]]

    monkeypatch.setattr(systems, "sweep", sweep)
    monkeypatch.setattr(arithmetic, "section", lambda: sizes)
    return seen


def measured_files(folder):
    """Files such as the benchmarks write."""
    info = {"machine": "a machine", "command": "scripts/x"}
    run = {"mean_running": 4.0, "output_tokens_per_s": 100.0, "shares": {"tokens": 0.3}, "same_answers": 64}
    best = {"mean_running": 12.0, "output_tokens_per_s": 250.0, "shares": {"tokens": 0.97}, "same_answers": 64}
    times = {size: {"recompute": 100.0, "swap_out": 2000 / size, "swap_in": 10.0} for size in (4, 16, 64)}
    for name, content in {
        "allocation": {"setting": {"requests": 64, "pool_tokens": 2048}, "runs": {"max_len": run, "paged": best}},
        "preemption": {"tokens": 512, "model": "m", "milliseconds": times},
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(info | content))
    for name in ("layout", "sharing"):
        (folder / f"{name}.json").write_text((ROOT / "benchmarks" / f"{name}.json").read_text())


def test_the_whole_page(no_simulator, tmp_path):
    measured_files(tmp_path)
    scale = dataclasses.replace(
        QUICK, models=(*TINY.models, "8xa100-opt-175b"), widths=(2, 6), variants=True, requests=40
    )
    sections = build(scale, tmp_path, progress=False)
    claims = [claim for section in sections for claim in section.claims]
    written = write(sections, tmp_path / "out", "A form.", {"form": "test"})
    page = (tmp_path / "out" / "index.html").read_text()
    assert {path.name for path in written} > {"index.html", "claims.md", "claims.json", "waste.png", "rates.png"}
    # All of it is in one file: no address is loaded, and each figure is there.
    assert re.findall(r'(?:src|href)="(?!data:|https://arxiv)', page) == []
    assert page.count("data:image/png;base64,") == sum(len(section.figures) for section in sections) == 8
    document = json.loads((tmp_path / "out" / "claims.json").read_text())
    assert len(document["claims"]) == len(claims) == sum(document["verdicts"].values()) > 60
    assert all(claim["verdict"] in {verdict.value for verdict in Verdict} for claim in document["claims"])
    table = (tmp_path / "out" / "claims.md").read_text()
    assert sum(line.startswith("| ") for line in table.splitlines()) == len(claims) + len(sections)
    shown = {claim.source for claim in claims}
    assert shown > {
        "Table 1",
        *(f"Fig. {n}" for n in ("2", "3", "6", "7", "8", "12", "13a", "13b", "14", "15a", "15b", "16")),
    }
    assert shown > {"Fig. 17", "Fig. 18a", "Fig. 18b", "Fig. 19a", "Fig. 19b", "Seed", "Abstract"}
    # Beams: what our model did is close to the paper, and says that it is another model.
    (beam,) = [claim for claim in claims if claim.what.startswith("Beam search, 2")]
    assert (beam.kind, beam.verdict) == ("measured", Verdict.REPRODUCED)
    assert "another model" in beam.note
    # The costs of paging are in every modelled run of it.
    paged = [config for config, _ in no_simulator if config.scheme == "paged"]
    assert all(config.attention_slowdown > 1.2 or config.page_seconds > 0 for config in paged)


def test_without_measurements_it_says_so():
    claims = measured.section(measured.Measured(None)).claims
    assert {claim.verdict for claim in claims} == {Verdict.UNCHECKED}
    assert any("benchmarks/allocation.json is not there" in claim.note for claim in claims)


def test_a_file_that_is_no_benchmark_is_named(tmp_path):
    (tmp_path / "layout.json").write_text('{"milliseconds": {"xla, page 16": {"contiguous": 1}}}')
    with pytest.raises(
        ValueError, match=r"layout.json: not a file of scripts/bench_layout.py: KeyError\('scattered'\)"
    ):
        measured.section(measured.Measured(tmp_path))
    (tmp_path / "layout.json").write_text("{")
    with pytest.raises(ValueError, match=r"layout\.json: not JSON"):
        measured.section(measured.Measured(tmp_path))


def test_capacity_is_the_rate_of_the_middle():
    config = systems.system("orca_max")
    result = stand_in(config, systems.requests_for(100.0, 50.0, "sharegpt"))
    width = float((result.workload.output * (0.02 + 0.0001 * 7)).mean())
    assert capacity_of(result) == pytest.approx(7 / width, rel=0.05)


def test_figure_2_has_the_papers_labels_and_ours():
    waste = {scheme: {"tokens": 30.0, "reserved": 20.0, "internal": 10.0, "external": 40.0} for scheme in paper.WASTE}
    (axes,) = drawing.waste(waste, paper.WASTE).axes
    texts = [text.get_text() for text in axes.texts]
    assert {"30.0", "20.4", "57.3", "8.9", "96.3"} < set(texts)
    assert axes.get_xlabel() == "share of the KV memory, %"


def test_help_of_the_command():
    command = [sys.executable, "-m", "pagedjax.simulate.report", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert "--quick" in done.stdout.replace("[no]", "")
    assert "--output" in done.stdout


def test_a_claim_is_not_shown_stronger_than_it_is():
    """Every claim has a mark; a number that is not the paper's own says so beside it, and so does ours."""
    claim = Claim("Fig.", "x", "1", "~", "2", "modelled", Verdict.NOT)
    assert claim.mark == "~"
    text = measured.section(measured.Measured(ROOT / "benchmarks"))
    assert all(claim.kind == "measured" for claim in text.claims if claim.verdict != Verdict.UNCHECKED)
