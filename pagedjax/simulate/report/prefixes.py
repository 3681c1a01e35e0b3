"""Figures 16 and 17, and the claim about many short chats: prefixes that requests have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from pagedjax.simulate.config import SimConfig
from pagedjax.simulate.lengths import ALPACA, LengthModel
from pagedjax.simulate.report import drawing, paper
from pagedjax.simulate.report.claim import Claim, holds, within
from pagedjax.simulate.report.rates import capacity_of
from pagedjax.simulate.report.section import Figure, Scale, Section
from pagedjax.simulate.report.systems import ORCA, run_named, system
from pagedjax.simulate.result import Result
from pagedjax.simulate.workload import Workload, conversations, independent

TRANSLATION = LengthModel(40.0, 45.0, sigma_prompt=0.6, sigma_output=0.6, max_total=1024)
"""Sentences to translate and their translations, in tokens: an assumption. The paper does not print WMT16's lengths."""

_SATURATED = 1e4  # requests a second
_SYSTEM_PROMPT = 2000
_LONG = 4096


def runs(scale: Scale) -> Iterator[tuple[Any, SimConfig, Workload]]:
    """Translations behind a prefix, conversations, and short chats behind a long system prompt."""
    num = scale.prefix_requests
    cached: dict[str, Any] = dict(prefix_caching=True, max_model_len=_LONG)
    for tokens in paper.PREFIX_GAIN:
        load = independent(num, _SATURATED, TRANSLATION, prefix_tokens=tokens)
        yield ("prefix", tokens, "paged"), system("paged", **cached), load
        yield ("prefix", tokens, "orca_oracle"), system("orca_oracle"), load
    chat = conversations(num, _SATURATED, "sharegpt", new=0.1)
    for scheme in ("paged", *ORCA):
        yield ("chat", 0, scheme), system(scheme), chat
    yield ("chat", 0, "cached"), system("paged", **cached), chat
    short = independent(num, 10.0, ALPACA, prefix_tokens=_SYSTEM_PROMPT)
    yield ("short", _SYSTEM_PROMPT, "paged"), system("paged", **cached), short


def claims_of(results: dict[Any, Result]) -> tuple[list[Claim], dict[str, dict[str, float]]]:
    """The claims, and the rates that are drawn, in requests a second."""
    rates = {name: capacity_of(result) for name, result in results.items() if name[0] != "short"}
    claims: list[Claim] = []
    drawn: dict[str, dict[str, float]] = {}
    for tokens, printed in paper.PREFIX_GAIN.items():
        pages, oracle = rates["prefix", tokens, "paged"], rates["prefix", tokens, "orca_oracle"]
        drawn[f"translation, prefix of {tokens} tokens"] = {"paged": pages, "orca_oracle": oracle}
        target = float(printed)
        claims.append(
            within(
                "Fig. 16",
                f"Prefix of {tokens} tokens: vLLM over Orca (Oracle)",
                (0.8 * target, 1.2 * target),
                pages / oracle,
                kind="modelled",
                unit="x",
                shown=f"{printed}x",
                than=1.0,
                note="both saturated; a fifth off is allowed, as the lengths of sentences are assumed",
            )
        )
    chat = {scheme: rates["chat", 0, scheme] for scheme in (*ORCA, "paged")}
    drawn["chat, nothing kept between turns"] = chat
    for scheme in ORCA:
        claims.append(
            within(
                "Fig. 17",
                f"Chat: vLLM over {paper.SYSTEMS[scheme]}",
                (1.8, 2.2),
                chat["paged"] / chat[scheme],
                kind="modelled",
                unit="x",
                shown="2x",
                than=1.0,
                note="both saturated, 2 within a tenth; the 2x does not come out of the figure's own graphics [3P]",
            )
        )
    least, most = (f(chat[s] for s in ORCA) for f in (min, max))
    claims.append(
        holds(
            "Fig. 17",
            "The three Orca variants coincide",
            "the same rate",
            f"{least:.2f} to {most:.2f} req/s",
            most / least < 1.1,
            kind="modelled",
            rule="less than a tenth apart",
            note="in the paper each gets room for 1,024 tokens of output; our Pow2 and Oracle know more of it",
        )
    )
    kept = rates["chat", 0, "cached"]
    drawn["chat, nothing kept between turns"] |= {"with a prefix cache": kept}
    claims.append(_short(results["short", _SYSTEM_PROMPT, "paged"]))
    return claims, drawn


def _short(result: Result) -> Claim:
    """How much of the prefix's tokens was found, of those that can be: all but the first request's."""
    prefix = int(result.workload.prefix_tokens[0])
    found = np.minimum(result.cached, prefix // result.config.page_size * result.config.page_size)
    share = 100 * float(found.sum()) / (prefix * (result.workload.num_requests - 1))
    what = f"Many short chats with one system prompt of {prefix:,} tokens: it is found instead of computed"
    return within(
        "Seed",
        what,
        (95, 100),
        share,
        kind="simulated",
        unit=" %",
        mark="seed",
        shown="close to 100 %",
        digits=1,
        note=f"{result.workload.num_requests} requests of Alpaca's lengths behind the prompt; 95 % counts as close",
    )


def section(scale: Scale, progress: bool) -> Section:
    """Figures 16 and 17."""
    claims, drawn = claims_of(run_named(runs(scale), progress))
    text = (
        "LLaMA-13B has the sizes of OPT-13B. Translation: the prefix is in the prompt of every request; pages hold it once and "
        "compute it once, Orca (Oracle) reserves and computes it for each. The lengths of the sentences are assumed (40 and 45 "
        "tokens on average). Chat: each prompt is the conversation so far, cut to 1,024 tokens, "
        "nothing is kept between turns, a "
        "request begins a new conversation with probability 0.1 [AE]. Rates are those of saturated systems, modelled."
    )
    caption = "Requests a second that each system takes at most, modelled. 'With a prefix cache' is what the paper does not do."
    figure = Figure("prefixes", caption, drawing.prefixes(drawn))
    return Section("Figures 16 and 17: shared prefixes and chat", text, tuple(claims), (figure,), {"prefixes": drawn})
