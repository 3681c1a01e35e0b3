"""What one simulated system is, as a frozen dataclass whose fields are also the command's options."""

from __future__ import annotations

import dataclasses
import math

from pagedjax.errors import ConfigError
from pagedjax.options import check, option, options
from pagedjax.policy import POLICIES
from pagedjax.simulate.cost import PRESETS, StepCost, calibrated, preset_named

SCHEMES = ("paged", "chunks", "orca_max", "orca_pow2", "orca_oracle", "faster_transformer")
"""How memory is handed out, and with it who may run together; see `SimConfig.scheme`."""

_RESERVATIONS = {"orca_max": "max", "orca_pow2": "pow2", "orca_oracle": "oracle", "faster_transformer": "max"}


@dataclasses.dataclass(frozen=True)
class SimConfig:
    """A serving system. ConfigError names the field, its range and the value."""

    scheme: str = option(
        "paged",
        "paged: the pages of this project, shared and taken on demand; chunks: chunks of page_size tokens on demand, nothing "
        "shared; orca_max, orca_pow2, orca_oracle: one contiguous reservation a sequence, by a buddy allocator; "
        "faster_transformer: as orca_max, and a batch is formed only when the one before has ended",
        choices=SCHEMES,
    )
    preset: str = option("a100-opt-13b", "model, device and cache memory", choices=tuple(PRESETS))
    calibration: str = option(
        "", "a file of scripts/bench_step.py to take the times of a step from; empty: the preset's"
    )
    page_size: int = option(16, "tokens in a page, a chunk, or a unit of a reservation", low=1, high=2048)
    num_pages: int = option(0, "pages, chunks or units in all; 0: the preset's memory", low=0, high=2**22)
    max_model_len: int = option(2048, "tokens of the longest request", low=1, high=2**17)
    max_running: int = option(256, "requests that run at once", low=1, high=4096)
    max_num_batched_tokens: int = option(2560, "tokens in one step", low=1, high=2**20)
    chunked_prefill: bool = option(False, "cut prompts to what the step's budget leaves, else they are computed whole")
    prefix_caching: bool = option(False, "keep pages of ended requests and map them into those that begin alike")
    policy: str = option(
        "first_come", "who goes first, and at the other end yields: a name in pagedjax.policy.POLICIES"
    )
    growth_share: float = option(
        0.0, "share of a request's output for which pages must be free before it is let in", low=0.0, high=1.0
    )
    preemption: str = option("recompute", "what becomes of pages of those that yield", choices=("recompute", "swap"))
    host_pages: int = option(-1, "pages in host memory for swapping; -1: as many as num_pages", low=-1, high=2**24)
    samples: int = option(1, "continuations of each request, all as long as its output", low=1, high=16)
    beams: tuple[tuple[int, ...], ...] = option(
        (), "for each step the parent of each beam, repeated; needs scheme paged", low=0, high=15
    )
    attention_slowdown: float = option(
        1.0,
        "factor on the time that attention takes to read the cache (paging costs 1.20 to 1.26 in the paper)",
        low=0.1,
        high=10,
    )
    page_seconds: float = option(0.0, "seconds that attention takes for each page beside reading it", low=0.0, high=1.0)
    moved_page_seconds: float = option(
        0.0, "seconds that each page moved to or from the host takes beside its bytes", low=0.0, high=1.0
    )
    horizon: float = option(0.0, "seconds to simulate; 0: until all requests are finished", low=0.0, high=1e6)

    def __post_init__(self) -> None:
        for path, entry in options(self):
            if path != "policy":
                check(f"system.{path}", entry.value, entry.type, entry.field.metadata)
        if self.policy not in POLICIES:
            raise ConfigError(f"config.system.policy: must be one of {', '.join(POLICIES)}; got {self.policy!r}")
        for step, parents in enumerate(self.beams):
            if len(parents) != self.samples or not all(0 <= parent < self.samples for parent in parents):
                raise ConfigError(
                    f"config.system.beams: each step names {self.samples} (samples) parents in [0, {self.samples}); "
                    f"got {parents} for step {step}"
                )
        if self.beams and (self.scheme != "paged" or self.samples < 2):
            raise ConfigError(
                f"config.system.beams: needs scheme paged and samples of at least 2, got {self.scheme!r} and {self.samples}"
            )
        if self.prefix_caching and self.scheme != "paged":
            raise ConfigError(f"config.system.prefix_caching: needs scheme paged, got {self.scheme!r}")
        if self.total_pages < 1:
            raise ConfigError(
                f"config.system.page_size: the preset's memory has no room for one page of {self.page_size}"
            )

    @property
    def family(self) -> str:
        """The allocator: paged, chunks or buddy."""
        return self.scheme if self.scheme in ("paged", "chunks") else "buddy"

    @property
    def reservation(self) -> str:
        """Which reservation a sequence gets; "" where it grows."""
        return _RESERVATIONS.get(self.scheme, "")

    @property
    def total_pages(self) -> int:
        """Usable pages, chunks or units."""
        preset = preset_named(self.preset)
        return self.num_pages or preset.cache_bytes // (preset.model.kv_bytes * self.page_size)

    @property
    def total_host_pages(self) -> int:
        """Pages in host memory."""
        return self.total_pages if self.host_pages < 0 else self.host_pages

    @property
    def cost(self) -> StepCost:
        """Coefficients of a step's time, in seconds."""
        cost = calibrated(self.calibration) if self.calibration else preset_named(self.preset).cost
        return cost._replace(
            per_context=cost.per_context * self.attention_slowdown,
            per_page=self.page_seconds,
            per_moved_page=self.moved_page_seconds,
        )

    @property
    def end(self) -> float:
        """Seconds at which the run is cut off; may be infinite."""
        return self.horizon or math.inf


def collapsing_beams(width: int) -> tuple[tuple[int, ...], ...]:
    """The pattern that shares most: after every step all beams go on from the best one."""
    return ((0,) * width,)


def parallel_beams(width: int) -> tuple[tuple[int, ...], ...]:
    """The pattern that shares least: every beam goes on from itself, as parallel samples do."""
    return (tuple(range(width)),)
