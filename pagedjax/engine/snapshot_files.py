"""A snapshot on disk: a folder that is there whole or not at all, readable by its owner only.

snapshot/
  snapshot.json    format version, what the snapshot belongs to, the arrays' shapes and dtypes, the files' sizes
  requests.json    queues, sequences, counters; what clients sent is in here
  secret.json      the words that seed the prefix hash (mode 0600)
  arrays/          Orbax: device state, pages of the host pool
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from pagedjax.errors import SnapshotError

DESCRIPTION, REQUESTS, SECRET, ARRAYS = "snapshot.json", "requests.json", "secret.json", "arrays"
FORMAT = 2


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The content of a snapshot.

    Attributes:
      description: what it belongs to (JSON values).
      requests: the host's side (JSON values).
      secret: two 32-bit words.
      arrays: by dotted name; on the CPU when read.
    """

    description: dict[str, Any]
    requests: dict[str, Any]
    secret: tuple[int, int]
    arrays: Mapping[str, Any]


def is_snapshot(folder: Path) -> bool:
    return (folder / DESCRIPTION).is_file()


def check_target(folder: str | os.PathLike[str]) -> Path:
    """The absolute path; SnapshotError where `write_snapshot` would not write."""
    target = Path(folder).expanduser().absolute()
    if target.exists() and not (target.is_dir() and (is_snapshot(target) or not any(target.iterdir()))):
        raise SnapshotError(f"{target} exists and is not a snapshot; it is not overwritten")
    return target


def write_snapshot(snapshot: Snapshot, folder: str | os.PathLike[str]) -> None:
    """Writes a snapshot; one that is there already is replaced when the new one is complete.

    Raises:
      SnapshotError: the folder holds something else, or cannot be made.
      OSError: the disk is full, or the like.
    """
    target = check_target(folder)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # mkdtemp makes it for the owner only, and so it stays: prompts are in it.
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise SnapshotError(f"{target}: cannot be written: {error.strerror}") from error
    try:
        _write_arrays(temporary / ARRAYS, snapshot.arrays)
        _write_json(temporary / REQUESTS, snapshot.requests)
        _write_json(temporary / SECRET, list(snapshot.secret))
        arrays = {n: {"shape": list(x.shape), "dtype": str(x.dtype)} for n, x in snapshot.arrays.items()}
        description = {"format": FORMAT, **snapshot.description, "arrays": arrays, "files": _sizes(temporary / ARRAYS)}
        _write_json(temporary / DESCRIPTION, description)
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
            os.replace(target, old)
            os.replace(temporary, target)
            shutil.rmtree(old)
        else:
            os.replace(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def read_description(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What a snapshot says of itself.

    Raises:
      SnapshotError: none there, damaged, or of another format.
    """
    path = Path(folder).expanduser()
    if not is_snapshot(path):
        raise SnapshotError(f"{path}: no snapshot there ({DESCRIPTION} is missing)")
    description = _read_json(path / DESCRIPTION)
    if description.get("format") != FORMAT:
        raise SnapshotError(
            f"{path}: a snapshot of format {description.get('format')!r}; this version of pagedjax reads {FORMAT}"
        )
    return description


def check_files(path: Path, description: Mapping[str, Any]) -> None:
    """Raises SnapshotError for a file that is missing or cut short."""
    found = _sizes(path / ARRAYS)
    for name, size in description["files"].items():
        if found.get(name) != size:
            state = "is missing" if name not in found else f"has {found[name]:,} bytes instead of {size:,}"
            raise SnapshotError(f"{path / ARRAYS}: {name} {state}")


def read_snapshot(folder: str | os.PathLike[str]) -> Snapshot:
    """Reads what `write_snapshot` wrote.

    Raises:
      SnapshotError: as `read_description`, or a part that is missing or cut short.
    """
    path = Path(folder).expanduser().absolute()
    description = read_description(path)
    check_files(path, description)
    high, low = _read_json(path / SECRET)
    arrays = _read_arrays(path / ARRAYS, description["arrays"])
    return Snapshot(description, _read_json(path / REQUESTS), (int(high), int(low)), arrays)


def _write_json(path: Path, value: Any) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.write("\n")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SnapshotError(f"{path}: cannot be read: {error}") from error


def _sizes(folder: Path) -> dict[str, int]:
    return {p.relative_to(folder).as_posix(): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": x} -> {"a": {"b": x}}; arrays without elements are left out, as they cannot be stored."""
    out: dict[str, Any] = {}
    for name, array in flat.items():
        if 0 in array.shape:
            continue
        *parents, leaf = name.split(".")
        node = out
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = array
    return out


@contextlib.contextmanager
def _without_notes() -> Iterator[None]:
    """Orbax writes a page of log lines for every folder, where absl shows them."""
    before = logging.get_verbosity()
    logging.set_verbosity(min(before, logging.WARNING))
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _write_arrays(folder: Path, arrays: Mapping[str, Any]) -> None:
    import orbax.checkpoint as ocp

    with _without_notes(), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, _nested(arrays))
        checkpointer.wait_until_finished()


def _read_arrays(folder: Path, shapes: Mapping[str, Any]) -> dict[str, np.ndarray]:
    import orbax.checkpoint as ocp

    # On the CPU: a pool of host pages has no business on the device, not even for a moment.
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    targets = {
        name: jax.ShapeDtypeStruct(tuple(entry["shape"]), jnp.dtype(entry["dtype"]), sharding=sharding)
        for name, entry in shapes.items()
    }
    try:
        with _without_notes(), ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(folder, _nested(targets))
    except Exception as error:  # Orbax and TensorStore raise bare exceptions of many kinds
        raise SnapshotError(f"{folder}: cannot be restored: {error}") from error
    out: dict[str, np.ndarray] = {}
    for name, target in targets.items():
        node: Any = np.zeros(target.shape, target.dtype)
        if node.size:
            node = restored
            for part in name.split("."):
                node = node[part]
        out[name] = np.asarray(node)
    return out
