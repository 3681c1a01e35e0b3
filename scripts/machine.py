"""What machine a benchmark ran on, in words."""

from __future__ import annotations

import os
import pathlib
import platform


def describe() -> str:
    """Processor, cores and the vector and matrix units that decide the speed of bfloat16."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    facts = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    facts = {name.strip(): value.strip() for name, value in facts.items()}
    units = [unit for unit in ("avx512f", "avx512_bf16", "amx_bf16") if unit in facts.get("flags", "").split()]
    return ", ".join([facts.get("model name", platform.machine()), f"{os.cpu_count()} cores", *units])
