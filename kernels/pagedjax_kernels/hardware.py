"""What the device is, as far as choosing a backend goes."""

from __future__ import annotations

from typing import NamedTuple

import jax


class Hardware(NamedTuple):
    """Attributes:
    platform: `cpu`, `gpu` or `tpu`.
    kind: the vendor's name of the device ("NVIDIA A100-SXM4-40GB", "TPU v5e", "cpu").
    compute_capability: NVIDIA's, as (major, minor); None elsewhere.
    """

    platform: str
    kind: str
    compute_capability: tuple[int, int] | None = None


def current_hardware() -> Hardware:
    """The device that a computation without explicit placement runs on: `jax_default_device`, else the first one."""
    device = jax.config.jax_default_device
    if isinstance(device, str):
        device = jax.devices(device)[0]
    if device is None:
        device = jax.devices()[0]
    platform = "gpu" if device.platform in ("cuda", "rocm", "gpu") else device.platform
    capability = None
    text = getattr(device, "compute_capability", None)
    if platform == "gpu" and text and all(part.isdigit() for part in str(text).split(".")):
        major, _, minor = str(text).partition(".")
        capability = (int(major), int(minor or 0))
    return Hardware(platform, device.device_kind, capability)
