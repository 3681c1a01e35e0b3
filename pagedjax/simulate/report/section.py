"""Parts of the report, and how much is run for them."""

from __future__ import annotations

import dataclasses
from typing import Any

from pagedjax.simulate.report.claim import Claim


@dataclasses.dataclass(frozen=True)
class Figure:
    """A picture: `name` becomes the file's name, `caption` says what is seen, `draw` is what matplotlib drew."""

    name: str
    caption: str
    drawn: Any  # matplotlib.figure.Figure


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading, a few sentences, claims, pictures. `numbers` is what other sections and the JSON use."""

    title: str
    text: str
    claims: tuple[Claim, ...]
    figures: tuple[Figure, ...] = ()
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much is simulated. Seconds are virtual."""

    name: str
    saturated_seconds: float  # figures 2 and 13a; the averages leave out the first fifth
    alpaca_seconds: float  # figure 13b; the averages leave out the first half
    variants: bool  # all of what the paper leaves open is varied, or the seed and one spread alone
    requests: int  # a point of a rate curve (figure 12)
    factors: tuple[float, ...]  # rates of the curve, over what the system takes when saturated
    models: tuple[str, ...]  # presets
    widths: tuple[int, ...]  # samples and beams
    sample_seconds: float  # figure 15
    page_sizes: tuple[int, ...]  # figures 18 and 19
    page_requests: int
    prefix_requests: int  # figures 16 and 17, and the claims without a source
    chunk_sizes: tuple[int, ...]  # tokens in a fixed chunk; those claims do not say


_MODELS = ("a100-opt-13b", "4xa100-opt-66b", "8xa100-opt-175b")

FULL = Scale(
    name="full",
    saturated_seconds=900.0,
    alpaca_seconds=40.0,
    variants=True,
    requests=2000,
    factors=(0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.3),
    models=_MODELS,
    widths=(2, 4, 6),
    sample_seconds=60.0,
    page_sizes=(1, 4, 8, 16, 32, 64, 128, 256),
    page_requests=3000,
    prefix_requests=800,
    chunk_sizes=(256, 512, 1024),
)
QUICK = Scale(
    name="quick",
    saturated_seconds=200.0,
    alpaca_seconds=16.0,
    variants=False,
    requests=500,
    factors=(0.6, 0.85, 1.0, 1.25),
    models=_MODELS[:1],
    widths=(2,),
    sample_seconds=10.0,
    page_sizes=(16, 128),
    page_requests=1000,
    prefix_requests=200,
    chunk_sizes=(1024,),
)
TINY = Scale(
    name="tiny",
    saturated_seconds=40.0,
    alpaca_seconds=2.0,
    variants=False,
    requests=24,
    factors=(0.6, 1.3),
    models=_MODELS[:1],
    widths=(2,),
    sample_seconds=1.0,
    page_sizes=(16,),
    page_requests=24,
    prefix_requests=24,
    chunk_sizes=(1024,),
)
"""For tests: the same code over next to nothing; its numbers mean nothing."""
