"""The memory of devices, by name or as a number."""

from __future__ import annotations

import difflib
import re

from pagedjax.errors import ConfigError

GIB, MIB, GB = 2**30, 2**20, 10**9

CARDS = {
    "T4": 15_360 * MIB,
    "V100-16GB": 16_384 * MIB,
    "V100-32GB": 32_768 * MIB,
    "A10G": 23_028 * MIB,
    "L4": 23_034 * MIB,
    "RTX-3090": 24_576 * MIB,
    "RTX-4090": 24_564 * MIB,
    "L40S": 46_068 * MIB,
    "A100-40GB": 40_960 * MIB,
    "A100-80GB": 81_920 * MIB,
    "H100-80GB": 81_559 * MIB,
    "H200": 143_771 * MIB,
    "B200": 183_359 * MIB,
    "TPU v4": 32 * GIB,
    "TPU v5e": 16 * GIB,
    "TPU v5p": 95 * GIB,
    "TPU v6e": 32 * GIB,
}
"""Bytes of one device: of a GPU what its driver reports as total, of a TPU chip what its documentation states. A runtime
keeps some of it for itself, which the fraction to use leaves room for."""

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*(GiB|GB|)", re.IGNORECASE)


def parse_memory(flag: str, text: str) -> int:
    """Bytes of "A100-40GB", "tpu v5e", "24" or "24GiB" (times 2^30), "24GB" (times 10^9).

    Raises:
      ConfigError: names the flag, and the cards that are known.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is not None:
        size = round(float(match[1]) * (GB if match[2].lower() == "gb" else GIB))
        if size < 1:
            raise ConfigError(f"{flag}: must be above 0, got {text!r}")
        return size
    names = {_plain(name): name for name in CARDS}
    if _plain(text) in names:
        return CARDS[names[_plain(text)]]
    near = [plain for plain in names if _plain(text) and plain.startswith(_plain(text))]
    near = near or difflib.get_close_matches(_plain(text), names, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(repr(names[n]) for n in near)}?" if near else f"cards are {', '.join(CARDS)}"
    raise ConfigError(f"{flag}: {text!r} is neither a number of GiB nor a known card; {hint}")


def _plain(name: str) -> str:
    return re.sub(r"[-_\s]", "", name.lower())
