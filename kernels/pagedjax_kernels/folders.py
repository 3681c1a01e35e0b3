"""Where this package keeps files on this computer."""

from __future__ import annotations

import os
import pathlib


def cache_folder(part: str) -> pathlib.Path:
    """The folder of one kind of files that can be made again: `part` in $PAGEDJAX_CACHE, else in ~/.cache/pagedjax."""
    root = os.environ.get("PAGEDJAX_CACHE")
    return (pathlib.Path(root) if root else pathlib.Path.home() / ".cache" / "pagedjax") / part
