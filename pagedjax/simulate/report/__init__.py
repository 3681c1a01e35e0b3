"""The claims of the PagedAttention paper (Kwon et al., SOSP 2023), and some that others make for it, tested.

    python -m pagedjax.simulate.report --output=reproduction
    python -m pagedjax.simulate.report --quick --output=reproduction

writes a page (`index.html`), the same table as Markdown (`claims.md`) and as JSON (`claims.json`), and the figures. Every
number of ours says how it was got:

computed    arithmetic, or the page verbs themselves
simulated   the allocators under a workload in virtual time, where the costs of a step matter little (memory is always full)
modelled    the same, where they matter: rates and latencies follow from a roofline (`pagedjax.simulate.cost`)
measured    read from benchmarks/*.json: the real engine and kernels, on the machine that the file names

and every claim gets one of the verdicts of `pagedjax.simulate.report.claim`.
"""

from pagedjax.simulate.report.build import build
from pagedjax.simulate.report.claim import Claim, Verdict, exact, holds, near, unchecked, within
from pagedjax.simulate.report.section import FULL, QUICK, TINY, Figure, Scale, Section

__all__ = [
    "FULL",
    "QUICK",
    "TINY",
    "Claim",
    "Figure",
    "Scale",
    "Section",
    "Verdict",
    "build",
    "exact",
    "holds",
    "near",
    "unchecked",
    "within",
]
