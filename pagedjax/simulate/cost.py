"""How long a step takes: a roofline of a named model on a named device, or one calibrated by a measurement.

    seconds = fixed + max(weights, per_token x T) + per_context x C + per_page x pages + per_pair x A + per_moved x M
            + per_moved_page x N

T   tokens that go through the linear layers in this step: one a decoding sequence, and the prompts' chunks
C   tokens of context whose keys and values attention reads: each sequence's own, sharing reads nothing less
A   pairs (query, key) in the prompts' chunks
M   tokens of keys and values moved between device and host, in N pages, each a copy of its own

with, for a model of W parameters in 2 bytes, L layers of width E, and c bytes of keys and values per token, on a device
with bandwidth b, peak p FLOP/s, and host link h, of which shares (efficiencies) are reached:

    weights = 2 W / b    per_token = 2 W / p    per_context = c / b    per_pair = 4 L E / p    per_moved = c / h

Devices' figures are from their data sheets. The shares reached and the fixed part are assumptions, stated at `Device`. So times
are modelled: compare systems under one model of costs, and do not read them as predictions.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any, NamedTuple

from pagedjax.pages.capacity import GIB


class StepCost(NamedTuple):
    """Coefficients of a step's time, in seconds; f32 scalars inside programs, so that a sweep may map over them."""

    fixed: Any  # a step
    weights: Any  # reading all weights once
    per_token: Any  # computing one token's linear layers
    per_context: Any  # reading one token's keys and values
    per_page: Any = 0.0  # looking up one page
    per_pair: Any = 0.0  # one query against one key, in prompts
    per_moved: Any = 0.0  # one token's keys and values to or from the host
    per_moved_page: Any = 0.0  # starting the copies of one page to or from the host


@dataclasses.dataclass(frozen=True)
class Device:
    """One or several devices as one: sums over all of them. Efficiencies are assumptions."""

    bandwidth: float  # bytes/s
    flops: float  # dense 16-bit FLOP/s
    host_link: float  # bytes/s in one direction
    bandwidth_efficiency: float = 0.8
    flops_efficiency: float = 0.5
    fixed: float = 0.004  # seconds a step: launches, sampling, scheduling, communication


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """What a step's cost depends on."""

    parameters: float
    num_layers: int
    hidden: int  # width of queries: heads x head dim
    kv_bytes: int  # of keys and values per token


def _times(device: Device, number: int) -> Device:
    """So many of them, each with a link of its own to the host."""
    sums = {name: getattr(device, name) * number for name in ("bandwidth", "flops", "host_link")}
    return dataclasses.replace(device, **sums)


A100_40GB = Device(bandwidth=1.555e12, flops=312e12, host_link=25e9)
A100_80GB = Device(bandwidth=2.039e12, flops=312e12, host_link=25e9)
H100 = Device(bandwidth=3.35e12, flops=989e12, host_link=50e9)
H200 = Device(bandwidth=4.8e12, flops=989e12, host_link=50e9)

OPT_13B = ModelSize(13e9, 40, 5120, 819_200)
OPT_66B = ModelSize(66e9, 64, 9216, 2_359_296)
OPT_175B = ModelSize(175e9, 96, 12_288, 4_718_592)


@dataclasses.dataclass(frozen=True)
class Preset:
    """A model on a device, and the memory that is left for its cache."""

    model: ModelSize
    device: Device
    cache_bytes: int

    @property
    def cost(self) -> StepCost:
        """Coefficients by the formulas above."""
        model, device = self.model, self.device
        bandwidth, flops = (
            device.bandwidth * device.bandwidth_efficiency,
            device.flops * device.flops_efficiency,
        )
        return StepCost(
            fixed=device.fixed,
            weights=2 * model.parameters / bandwidth,
            per_token=2 * model.parameters / flops,
            per_context=model.kv_bytes / bandwidth,
            per_pair=4 * model.num_layers * model.hidden / flops,
            per_moved=model.kv_bytes / device.host_link,
        )


PRESETS = {
    # Cache memory as in Kwon et al. 2023, table 1.
    "a100-opt-13b": Preset(OPT_13B, A100_40GB, 12 * GIB),
    "4xa100-opt-66b": Preset(OPT_66B, _times(A100_40GB, 4), 21 * GIB),
    "8xa100-opt-175b": Preset(OPT_175B, _times(A100_80GB, 8), 264 * GIB),
    # 80 and 141 GB, of which weights take 26 GB and activations are given 10 % of all.
    "h100-opt-13b": Preset(OPT_13B, H100, int(0.9 * 80e9 - 26e9)),
    "h200-opt-13b": Preset(OPT_13B, H200, int(0.9 * 141e9 - 26e9)),
}


def preset_named(name: str) -> Preset:
    """ValueError lists those there are."""
    if name not in PRESETS:
        raise ValueError(f"preset: must be one of {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[name]


def calibrated(path: str | pathlib.Path) -> StepCost:
    """Coefficients from what `scripts/bench_step.py --output=path` measured.

    One point cannot tell reading weights from computing with them. Linear layers, head and sampling are taken as
    proportional to the rows (which holds on CPUs, where they are bound by arithmetic), attention to the context, and the rest
    as fixed. Moving is a copy: as long as reading.

    Raises:
      ValueError: a figure that is missing.
    """
    try:
        data = json.loads(pathlib.Path(path).read_text())
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) else f"not JSON: {e}"
        raise ValueError(f"config.system.calibration: {path}: {reason}") from None
    try:
        rows, context, ms = data["rows"], data["context"], data["figures"]
        parts = ms["linear layers"] + ms["head"] + ms["sampling"]
        fixed = max(ms["whole step"] - parts - ms["attention"], 0.0)
        per_context = ms["attention"] * 1e-3 / (rows * context)
    except (KeyError, TypeError) as e:
        raise ValueError(f"{path}: not a file of scripts/bench_step.py: {e} is missing") from None
    return StepCost(
        fixed=fixed * 1e-3,
        weights=0.0,
        per_token=parts * 1e-3 / rows,
        per_context=per_context,
        per_pair=per_context,
        per_moved=per_context,
    )
