"""Where pagedjax keeps files on this computer."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder for what can be fetched or made again: $PAGEDJAX_CACHE, else pagedjax in the user's cache folder."""
    if os.environ.get("PAGEDJAX_CACHE"):
        return Path(os.environ["PAGEDJAX_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedjax"
