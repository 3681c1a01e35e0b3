"""Tensors of a directory of safetensors files, single or sharded, read one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from pagedjax.errors import ModelLoadError

INDEX = "model.safetensors.index.json"


class SafetensorsFolder(Mapping[str, np.ndarray]):
    """name -> array in the file's dtype. Nothing is kept; files stay open (memory-mapped).

    Raises:
      ModelLoadError: no weights, a missing or damaged file, or a tensor that two files hold; names it.
    """

    def __init__(self, folder: Path):
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        index = folder / INDEX
        names = self._from_index(index) if index.exists() else self._from_listing(folder)
        for name in names:
            self._open(folder / name)

    def __getitem__(self, name: str) -> np.ndarray:
        file = self._file_of[name]
        try:
            return self._files[file].get_tensor(name)
        except (SafetensorError, TypeError, AttributeError, ValueError) as error:
            raise ModelLoadError(f"{file}: tensor {name!r} cannot be read: {error}") from error

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    @staticmethod
    def _from_index(index: Path) -> list[str]:
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelLoadError(f"{index}: not an index of safetensors shards ({error!r}); fetch it again") from error
        for name in names:
            if not isinstance(name, str) or name != Path(name).name or not name.endswith(".safetensors"):
                raise ModelLoadError(f"{index}: {name!r} is not the name of a safetensors file in the same folder")
        return names

    @staticmethod
    def _from_listing(folder: Path) -> list[str]:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        if "model.safetensors" in names:
            return ["model.safetensors"]
        # Mistral's own files hold the same weights once more, under other names.
        names = [name for name in names if not name.startswith("consolidated")]
        if not names:
            pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
            if pickles:
                raise ModelLoadError(
                    f"{folder}: {pickles[0]} is a pickle, which can run any code when it is read; "
                    f"pagedjax reads safetensors only: convert it where you trust it"
                )
            raise ModelLoadError(f"{folder}: no *.safetensors files")
        return names

    def _open(self, path: Path) -> None:
        try:
            file = safe_open(path, framework="numpy")
            names = list(file.keys())
        except FileNotFoundError:
            raise ModelLoadError(f"{path}: this shard is missing; fetch it again") from None
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path}: damaged or cut off ({error}); fetch it again") from error
        self._files[str(path)] = file
        for name in names:
            if name in self._file_of:
                raise ModelLoadError(f"{path}: tensor {name!r} is also in {self._file_of[name]}")
            self._file_of[name] = str(path)
