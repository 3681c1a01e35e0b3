"""Claims that are made for paging, some without a source: 10 / 20 / 50 requests at once, 200 / 150 / 80 ms, 2-4x, 95 %."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pagedjax.pages.capacity import pages_for
from pagedjax.simulate.config import SimConfig
from pagedjax.simulate.report import paper
from pagedjax.simulate.report.claim import Claim, Verdict, holds, unchecked, within
from pagedjax.simulate.report.section import Scale, Section
from pagedjax.simulate.report.systems import ORCA, run_named, system
from pagedjax.simulate.result import Result
from pagedjax.simulate.workload import Workload, independent

_SYSTEMS = {"contiguous": "orca_max", "paged": "paged"}
AT_ONCE = (10, 20, 50)
LATENCY_MS = (200, 150, 80)
_SATURATED = 1e4
_FULL = 0.0
_SHARES = (0.8, 0.9, 1.0, 1.1, 1.2)
"""Rates at which latencies are compared, over what contiguous reservation takes at most."""


def runs(scale: Scale, most: float) -> Iterator[tuple[Any, SimConfig, Workload]]:
    """Contiguous reservation of the longest, fixed chunks, pages: saturated, and at rates around `most`; ShareGPT."""
    systems: dict[Any, SimConfig] = {name: system(s, max_running=64) for name, s in _SYSTEMS.items()}
    systems |= {size: system("chunks", page_size=size, max_running=64) for size in scale.chunk_sizes}
    for share in (_FULL, *_SHARES):
        rate = _SATURATED if share == _FULL else share * most
        for name, config in systems.items():
            yield (name, share), config, independent(scale.prefix_requests, rate, "sharegpt")


def _running(result: Result) -> float:
    """While some always wait: the middle half of the run."""
    return result.mean_running(result.seconds / 4, 3 * result.seconds / 4)


def arithmetic() -> Claim:
    """For which mean lengths the ratio of requests at once is 10 : 50."""
    at, per = 2048 * AT_ONCE[0] / AT_ONCE[2], 2048 * AT_ONCE[0] / AT_ONCE[1]
    mean = int(at)
    fits = 2048 / (16 * pages_for(mean, 16))
    return holds(
        "Seed",
        "10 / 20 / 50 requests at once: contiguous, fixed chunks, pages",
        "10 : 20 : 50",
        f"holds for requests that hold {at:.0f} tokens on average, where 2,048 are reserved and chunks are of {per:.0f}",
        math.isclose(fits, 5, rel_tol=0.05),
        kind="computed",
        mark="seed",
        rule="reserved over held, in whole pages, is 5; reserved over one chunk is 2",
        note="the ratio is one of lengths; as numbers without a memory and a model, 10, 20 and 50 mean nothing",
    )


def at_once(results: Mapping[Any, Result]) -> tuple[Claim, int]:
    """The ratio under ShareGPT's lengths, and the chunk size that comes closest to it."""
    running = {name: _running(result) for (name, share), result in results.items() if share == _FULL}
    base = running["contiguous"]
    paged = 10 * running["paged"] / base
    chunks = {name: 10 * value / base for name, value in running.items() if name not in _SYSTEMS}
    best = min(chunks, key=lambda size: abs(chunks[size] - AT_ONCE[1]))
    shown = ", ".join(f"{value:.0f} with chunks of {size}" for size, value in chunks.items())
    close = abs(chunks[best] - 20) <= 2 and abs(paged - 50) <= 5
    verdict = Verdict.REPRODUCED if close else Verdict.DIRECTION if 10 < chunks[best] < paged else Verdict.NOT
    claim = Claim(
        "Seed",
        "The same with ShareGPT's lengths on OPT-13B",
        "10 : 20 : 50",
        "seed",
        f"10 : ({shown}) : {paged:.0f}",
        "simulated",
        verdict,
        "a tenth off is allowed, with the best of the chunk sizes",
        f"closest with chunks of {best} tokens; reservation is of 2,048 tokens, all systems saturated",
        {"contiguous": 10, "paged": paged, **{f"chunks of {s}": v for s, v in chunks.items()}},
    )
    return claim, best


def latency(results: Mapping[Any, Result], size: int) -> Claim:
    """Is there a rate at which latencies are as 200 : 150 : 80? Above saturation any ratio comes up sooner or later."""
    want = LATENCY_MS[0] / LATENCY_MS[2], LATENCY_MS[1] / LATENCY_MS[2]
    lines, found = [], False
    for share in _SHARES:
        one, two, three = (results[name, share].normalized_latency for name in ("contiguous", size, "paged"))
        lines.append(f"at {share:.1f}: {1e3 * one:.0f} / {1e3 * two:.0f} / {1e3 * three:.0f}")
        found = found or (abs(one / three / want[0] - 1) <= 0.2 and abs(two / three / want[1] - 1) <= 0.2)
    return holds(
        "Seed",
        "Latency 200 / 150 / 80 ms: contiguous, fixed chunks, pages",
        "2.5 : 1.9 : 1",
        f"ms a token, waiting included, by rate: {'; '.join(lines)}",
        found,
        kind="modelled",
        mark="seed",
        partly=all(
            results["contiguous", s].normalized_latency > results["paged", s].normalized_latency for s in (1.1, 1.2)
        ),
        rule="some rate has both ratios within a fifth",
        note="of what is not said; rates are over what reservation takes at most, chunks of "
        f"{size}. Pages shorten waiting, not steps: "
        "with more requests in it, a step takes longer. So the ratio is one of the load",
    )


def from_others(numbers: Mapping[str, Any]) -> list[Claim]:
    """What follows from the other sections."""
    claims = []
    waste = numbers["waste"]
    wasted = sorted(100 - waste[s]["tokens"] for s in ORCA)
    pages = 100 - waste["paged"]["tokens"]
    claims.append(
        holds(
            "Seed",
            "Waste falls from 60-80 % to under 4 %",
            "60-80 %, under 4 %",
            f"{wasted[0]:.0f}-{wasted[-1]:.0f} %, {pages:.1f} %",
            wasted[0] >= 59.5 and wasted[-1] <= 80.5 and pages < 4,
            kind="simulated",
            mark="seed",
            partly=pages < wasted[0],
            rule="within the ranges, in whole percent",
            note="the paper: 61.8 to 79.6 %, and 3.7 %. Only where requests always wait: without "
            "a queue, memory is free in any system",
        )
    )
    claims.append(
        within(
            "Seed",
            "Pages use more than 95 % of the memory",
            (95, 100),
            100 - pages,
            kind="simulated",
            unit=" %",
            digits=1,
            mark="seed",
            shown="above 95 %",
            than=50.0,
            note="the same run",
        )
    )
    batch = numbers["batched"]["sharegpt"]
    for other, name in (("orca_max", "Max"), ("orca_oracle", "Oracle")):
        claims.append(
            within(
                "Seed",
                f"A batch 2-4 times as large, over Orca ({name})",
                (2, 4),
                batch["paged"] / batch[other],
                kind="modelled",
                unit="x",
                mark="seed",
                shown="2x to 4x",
                than=1.0,
                note="ShareGPT, 2 requests a second",
            )
        )
    return claims


def throughput(rates: Mapping[str, Any]) -> list[Claim]:
    """Figure 12's sustained rates against the abstract's 2-4x."""
    claims = []
    for case, systems in rates.items():
        preset, _, dataset = case.partition(" ")
        if dataset != "sharegpt":
            continue
        for other in (*ORCA, "faster_transformer"):
            ratio = systems["paged"]["sustained"] / systems[other]["sustained"]
            claims.append(
                within(
                    "Abstract",
                    f"2-4x throughput at equal latency: {paper.MODELS[preset]}, ShareGPT, over {paper.SYSTEMS[other]}",
                    (2, 4),
                    ratio,
                    kind="modelled",
                    unit="x",
                    shown="2x to 4x",
                    than=1.0,
                    note="sustained rates of figure 12",
                )
            )
    return claims


def section(scale: Scale, progress: bool, numbers: Mapping[str, Any]) -> Section:
    """All of it."""
    most = numbers["rates"]["a100-opt-13b sharegpt"]["orca_max"]["capacity"]
    results = run_named(runs(scale, most), progress)
    claim, size = at_once(results)
    claims = [
        *from_others(numbers),
        *throughput(numbers["rates"]),
        arithmetic(),
        claim,
        latency(results, size),
        unchecked(
            "Seed",
            "Whose measurements 10 / 20 / 50 and 200 / 150 / 80 ms are",
            "-",
            "no model, device, workload or unit is given with them",
            mark="seed",
        ),
    ]
    text = (
        "Numbers that are quoted for paged attention, some of them without saying where they are from. For those we look for "
        "assumptions under which they hold, and say which."
    )
    return Section("Claims from elsewhere", text, tuple(claims), numbers={"chunk_tokens": size})
