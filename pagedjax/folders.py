"""Where pagedjax keeps files on this computer, and whether it may write where it is asked to."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from pagedjax.errors import ConfigError


def cache_folder() -> Path:
    """The folder for what can be fetched or made again: $PAGEDJAX_CACHE, else pagedjax in the user's cache folder."""
    if os.environ.get("PAGEDJAX_CACHE"):
        return Path(os.environ["PAGEDJAX_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedjax"


def check_file_target(flag: str, path: str) -> None:
    """Raises ConfigError where no file can be written at `path` ("" is none): before the work whose result it is to hold."""
    if not path:
        return
    parent = os.path.dirname(path) or "."
    if os.path.isdir(path):
        raise ConfigError(f"{flag}={path}: is a folder, name a file")
    if not os.path.isdir(parent):
        raise ConfigError(f"{flag}={path}: there is no folder {parent}")
    existed = os.path.exists(path)
    try:
        with open(path, "ab"):
            pass
        if not existed:
            os.remove(path)
    except OSError as error:
        raise ConfigError(f"{flag}={path}: cannot be written: {error.strerror}") from None


def check_folder_target(flag: str, path: str) -> None:
    """Makes the folder `path` ("" is none) where there is none. ConfigError where it cannot be made or written to."""
    if not path:
        return
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except FileExistsError:
        raise ConfigError(f"{flag}={path}: is a file, name a folder") from None
    except OSError as error:
        raise ConfigError(f"{flag}={path}: cannot be written to: {error.strerror}") from None
