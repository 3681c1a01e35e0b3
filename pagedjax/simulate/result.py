"""What came out of a run."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pagedjax.simulate.config import SimConfig
from pagedjax.simulate.state import CHANNELS, FINISHED, State
from pagedjax.simulate.workload import Workload

WASTE = ("tokens", "reserved", "internal", "external")


@dataclasses.dataclass(frozen=True)
class Result:
    """One run. Q requests in order of arrival; times in virtual seconds, NaN for requests that did not get so far."""

    config: SimConfig
    workload: Workload
    finished: np.ndarray  # bool[Q]
    first_token: np.ndarray  # f32[Q] seconds from the arrival to the first token
    latency: np.ndarray  # f32[Q] seconds from the arrival to the last token
    first_admitted: np.ndarray  # i32[Q] iterations before it was let in; -1 never
    first_iteration: np.ndarray  # i32[Q] number of the iteration that gave the first token; -1 none did
    last_iteration: np.ndarray  # i32[Q] of that which gave the last
    preemptions: np.ndarray  # i32[Q]
    cached: np.ndarray  # i32[Q] prompt tokens that the prefix cache had
    seconds: float  # how long the run was
    iterations: int
    trips: int  # of the simulator: iterations that were jumped over cost none
    swapped_out: int  # pages
    swapped_in: int  # pages
    recomputed: int  # tokens that had been computed before their request was preempted
    bin_seconds: float
    bins: dict[str, np.ndarray]  # f64[bins] by name in CHANNELS: sums over the iterations that begin in the bin

    def _sum(self, name: str, start: float = 0.0, end: float = np.inf) -> float:
        begin = np.arange(len(self.bins[name])) * self.bin_seconds
        return float(self.bins[name][(begin >= start) & (begin < end)].sum())

    def mean_running(self, start: float = 0.0, end: float = np.inf) -> float:
        """Requests that run, on average over the time from `start` to `end` (seconds, whole bins); NaN for no time."""
        seconds = self._sum("seconds", start, end)
        return self._sum("running", start, end) / seconds if seconds else float("nan")

    def waste(self, start: float = 0.0, end: float = np.inf) -> dict[str, float]:
        """Shares of all slots, on average over iterations: they add up to 1 (see `pagedjax.simulate.account`)."""
        iterations = self._sum("iterations", start, end)
        if not iterations:
            return dict.fromkeys(WASTE, float("nan"))
        shares = {name: self._sum(name, start, end) / iterations for name in WASTE[:3]}
        return {**shares, "external": 1.0 - sum(shares.values())}

    def owned_waste(self, start: float = 0.0, end: float = np.inf) -> dict[str, float]:
        """The same of the slots in pages that somebody owns: what paging itself wastes, whatever the load."""
        parts = {name: self._sum(name, start, end) for name in WASTE[:3]}
        total = sum(parts.values())
        return {name: value / total if total else float("nan") for name, value in parts.items()}

    def sharing(self, start: float = 0.0, end: float = np.inf) -> float:
        """Pages saved by sharing: (mapped - distinct) / mapped, over all iterations (Kwon et al. 2023, figure 15)."""
        mapped = self._sum("mapped", start, end)
        return (mapped - self._sum("distinct", start, end)) / mapped if mapped else 0.0

    @property
    def normalized_latency(self) -> float:
        """Mean over finished requests of latency / output tokens, seconds per token; NaN if none finished."""
        each = self.latency[self.finished] / self.workload.output[self.finished]
        return float(each.mean()) if each.size else float("nan")

    @property
    def throughput(self) -> float:
        """Generated tokens per second, by all continuations."""
        return self._sum("generated") / self.seconds if self.seconds else float("nan")

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens of admitted requests that the prefix cache had."""
        seen = self.first_admitted >= 0
        total = int(self.workload.prompt[seen].sum())
        return float(self.cached[seen].sum()) / total if total else 0.0

    @property
    def met_deadlines(self) -> float:
        """Share of requests that were finished by their deadline; they are not cut off by it."""
        return float((self.finished & (np.nan_to_num(self.latency, nan=np.inf) <= self.workload.deadline)).mean())

    def summary(self) -> dict[str, Any]:
        """The figures of a run as JSON values."""
        reached = self.first_token[~np.isnan(self.first_token)]

        def percentile(values: np.ndarray, q: float) -> float | None:
            return float(np.percentile(values, q)) if values.size else None

        def plain(value: float) -> float | None:
            return None if np.isnan(value) else value

        return {
            "requests": self.workload.num_requests,
            "finished": int(self.finished.sum()),
            "seconds": self.seconds,
            "iterations": self.iterations,
            "trips": self.trips,
            "normalized_latency": plain(self.normalized_latency),
            "time_to_first_token_mean": float(reached.mean()) if reached.size else None,
            "time_to_first_token_p99": percentile(reached, 99),
            "latency_p50": percentile(self.latency[self.finished], 50),
            "latency_p99": percentile(self.latency[self.finished], 99),
            "tokens_per_second": plain(self.throughput),
            "requests_per_second": float(self.finished.sum()) / self.seconds if self.seconds else None,
            "mean_running": plain(self.mean_running()),
            "waste": {name: plain(value) for name, value in self.waste().items()},
            "owned_waste": {name: plain(value) for name, value in self.owned_waste().items()},
            "sharing": self.sharing(),
            "hit_rate": self.hit_rate,
            "preemptions": int(self.preemptions.sum()),
            "preempted_requests": int((self.preemptions > 0).sum()),
            "swapped_out_pages": self.swapped_out,
            "swapped_in_pages": self.swapped_in,
            "recomputed_tokens": self.recomputed,
            "met_deadlines": self.met_deadlines,
        }

    def series(self) -> dict[str, np.ndarray]:
        """Over time, a value a bin, NaN where nothing ran: `time` (its middle), `running`, `waiting`, the parts of the waste,
        `tokens_per_second`."""
        width = self.bin_seconds
        used = np.flatnonzero(self.bins["seconds"] > 0)
        num = int(used[-1]) + 1 if used.size else 0
        seconds, iterations = self.bins["seconds"][:num], self.bins["iterations"][:num]
        with np.errstate(divide="ignore", invalid="ignore"):
            out = {"time": (np.arange(num) + 0.5) * width}
            out |= {name: self.bins[name][:num] / seconds for name in ("running", "waiting")}
            out |= {name: self.bins[name][:num] / iterations for name in WASTE[:3]}
            out["external"] = 1 - (out["tokens"] + out["reserved"] + out["internal"])
            out["tokens_per_second"] = self.bins["generated"][:num] / seconds
        return out


def read_result(config: SimConfig, workload: Workload, state: State) -> Result:
    """The result of one run's final state, on the host."""
    requests: Any = state.requests  # NumPy arrays by now
    Q = workload.num_requests
    finished = requests.status[:Q] == FINISHED
    bins = np.asarray(state.bins, np.float64)
    return Result(
        config=config,
        workload=workload,
        finished=finished,
        first_token=requests.first_token[:Q],
        latency=requests.finish[:Q],
        first_admitted=requests.first_admitted[:Q],
        first_iteration=requests.first_iteration[:Q],
        last_iteration=requests.last_iteration[:Q],
        preemptions=requests.preemptions[:Q],
        cached=requests.cached[:Q],
        seconds=float(np.float64(state.now[0]) + np.float64(state.now[1])),
        iterations=int(state.iteration),
        trips=int(state.trips),
        swapped_out=int(state.swapped_out),
        swapped_in=int(state.swapped_in),
        recomputed=int(state.recomputed),
        bin_seconds=float(state.bin_seconds),
        bins={name: bins[:, i] for i, name in enumerate(CHANNELS)},
    )
