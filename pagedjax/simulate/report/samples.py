"""Figures 14 and 15: parallel samples and beam search."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pagedjax.simulate.config import SimConfig, collapsing_beams
from pagedjax.simulate.report import drawing, paper
from pagedjax.simulate.report.claim import Claim, Verdict, near, unchecked, within
from pagedjax.simulate.report.measured import Measured
from pagedjax.simulate.report.section import Figure, Scale, Section
from pagedjax.simulate.report.systems import requests_for, run_named, system, variants
from pagedjax.simulate.result import Result
from pagedjax.simulate.workload import Workload

_LABEL = "Fig. 15"


def runs(scale: Scale) -> Iterator[tuple[Any, SimConfig, Workload]]:
    """Alpaca at the artifact's rate, each with some samples or beams. Beams in the pattern that shares most."""
    seconds, rate = scale.sample_seconds, paper.SAMPLE_RATE
    for width in scale.widths:
        paged = system("paged", samples=width, horizon=seconds)
        for name, (lengths, seed) in variants("alpaca", scale.variants).items():
            yield ("parallel", width, name), paged, requests_for(seconds, rate, lengths, seed)
        beams = system("paged", samples=width, horizon=seconds, beams=collapsing_beams(width))
        yield ("beam", width, "as shown"), beams, requests_for(seconds, rate, "alpaca")
    if not scale.variants:
        return
    for width in (1, max(scale.widths)):
        workload = requests_for(seconds, 3 * rate, "alpaca")
        yield ("oracle", width, "full"), system("orca_oracle", samples=width, horizon=seconds), workload
    yield ("paged", 1, "full"), system("paged", horizon=seconds), requests_for(seconds, 3 * rate, "alpaca")


def _per_second(result: Result) -> float:
    """Requests finished a second in the second half."""
    ends = (result.workload.arrival + result.latency)[result.finished]
    half = result.seconds / 2
    return float((ends >= half).sum()) / half


def claims_of(scale: Scale, results: dict[Any, Result], measured: Measured) -> tuple[list[Claim], dict[str, Any]]:
    """The claims, and what is drawn."""
    real = measured.sharing()
    claims: list[Claim] = []
    drawn: dict[str, Any] = {"parallel": {}, "beam": {}}
    for width in scale.widths:
        saved = {n: 100 * r.sharing() for (kind, w, n), r in results.items() if (kind, w) == ("parallel", width)}
        ours, spread = saved["as shown"], (min(saved.values()), max(saved.values()))
        note = "a real run of the default model is in the section on measurements" if real else ""
        claims.append(
            near(
                _LABEL + "a",
                f"Parallel sampling, {width} samples: pages saved",
                paper.PARALLEL_SAVED[width],
                ours,
                spread,
                kind="simulated",
                unit=" %",
                than=0.0,
                note=note,
            )
        )
        bound = 100 * results["beam", width, "as shown"].sharing()
        drawn["parallel"][width], drawn["beam"][width] = ours, (ours, bound)
        claims.append(_beam(width, ours, bound, real))
    return claims, drawn


def _beam(width: int, least: float, most: float, real: dict[str, dict[str, float]] | None) -> Claim:
    """Survivors decide, and those follow from a model's probabilities: there are bounds, and what our model did."""
    printed = paper.BEAM_SAVED[width]
    what = f"Beam search, {width} beams: pages saved"
    between = least <= float(printed) <= most
    bounds = f"between {least:.1f} % (no beam dies) and {most:.1f} % (all go on from the best)"
    if real is None or str(width) not in real["beam"]:
        return unchecked(
            _LABEL + "b",
            what,
            f"{printed} %",
            "which beams survive follows from the probabilities of OPT-13B; the "
            f"paper's number is {'inside' if between else 'outside'} the bounds",
            ours=bounds,
            kind="simulated",
        )
    ours = real["beam"][str(width)]
    claim = within(_LABEL + "b", what, (least, most), float(printed), kind="measured", unit=" %", than=0.0)
    verdict = Verdict.DIRECTION if claim.verdict == Verdict.REPRODUCED else Verdict.NOT
    if abs(ours - float(printed)) <= 0.1 * float(printed):
        verdict = Verdict.REPRODUCED
    return Claim(
        _LABEL + "b",
        what,
        f"{printed} %",
        "P",
        f"{ours:.2f} %",
        "measured",
        verdict,
        "within a tenth of the paper's number",
        f"SmolLM2-135M, another model, other lengths, real text; simulated bounds for OPT-13B: {bounds}",
        {"paper": float(printed), "ours": ours, "low": least, "high": most},
    )


def gain(scale: Scale, results: dict[Any, Result]) -> list[Claim]:
    """Figure 14's text: 1.3x over Oracle for one sample, 2.3x for beams of six."""
    if ("paged", 1, "full") not in results:
        return []
    one = _per_second(results["paged", 1, "full"]) / _per_second(results["oracle", 1, "full"])
    claims = [
        within(
            "Fig. 14",
            "Alpaca, one sample: vLLM over Orca (Oracle)",
            (1.2, 1.4),
            one,
            kind="modelled",
            unit="x",
            shown="1.3x",
            than=1.0,
            note="1.3 within its last digit, both systems saturated",
        )
    ]
    width = max(scale.widths)
    if width == 6:
        most, least = (
            _per_second(results[kind, 6, "as shown"]) / _per_second(results["oracle", 6, "full"])
            for kind in ("beam", "parallel")
        )
        what = "Alpaca, beams of 6: vLLM over Orca (Oracle)"
        shown = f"{least:.2f}x to {most:.2f}x"
        verdict = Verdict.REPRODUCED if least <= 2.3 <= most else Verdict.DIRECTION if most > 1 else Verdict.NOT
        claims.append(
            Claim(
                "Fig. 14",
                what,
                "2.3x",
                "P",
                shown,
                "modelled",
                verdict,
                "2.3 is between the bounds",
                "bounds: no beam dies, and all go on from the best one; both systems saturated",
                {"low": least, "high": most},
            )
        )
    claims.append(
        unchecked(
            _LABEL,
            "ShareGPT: parallel sampling saves 16.2 to 30.5 %, beams 44.3 to 66.3 %",
            "ranges",
            "the paper does not say which number belongs to which width",
        )
    )
    return claims


def section(scale: Scale, progress: bool, measured: Measured) -> Section:
    """Figures 14 and 15."""
    results = run_named(runs(scale), progress)
    claims, drawn = claims_of(scale, results, measured)
    text = (
        f"OPT-13B, requests as long as Alpaca's at {paper.SAMPLE_RATE:g} a second [AE] for "
        f"{scale.sample_seconds:g} virtual seconds. "
        "Every sample runs to the length of its request, as in the artifact. Saved: pages that sharing saves, of those needed "
        "without it, over all iterations. Beams depend on a model's probabilities, so there are simulated bounds, and what "
        "one real model did."
    )
    real = measured.sharing()
    caption = (
        "Pages saved by sharing, Alpaca. Left: parallel samples; right: beams, the bar "
        "from the least to the most possible."
    )
    figure = Figure("sharing", caption, drawing.sharing(drawn, real))
    return Section(
        "Figures 14 and 15: sharing inside a request",
        text,
        (*claims, *gain(scale, results)),
        (figure,),
        {"sharing": drawn},
    )
