"""What machine a benchmark ran on, and by which command, in words."""

from __future__ import annotations

import logging
import os
import pathlib
import platform
import re
import sys

# Benchmarks print their own lines; what JAX finds no driver for is nobody's concern.
logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)


def describe() -> str:
    """Processor, cores and the vector and matrix units that decide the speed of bfloat16."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    facts = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    facts = {name.strip(): value.strip() for name, value in facts.items()}
    units = [unit for unit in ("avx512f", "avx512_bf16", "amx_bf16") if unit in facts.get("flags", "").split()]
    return ", ".join([facts.get("model name", platform.machine()), f"{os.cpu_count()} cores", *units])


def command() -> str:
    """The command line, absolute paths cut to their last part: where files lie is this machine's business."""
    return " ".join(re.sub(r"(^|=)/(?:[^/ ]+/)*", r"\1", argument) for argument in sys.argv)
