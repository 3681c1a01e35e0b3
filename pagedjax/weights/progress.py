"""A progress bar over tensors as they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from tqdm import tqdm

SHOW_AFTER_SECONDS = 2.0


class WithProgress(Mapping[str, np.ndarray]):
    """The same tensors; a bar on stderr counts those that were read, once reading takes longer than two seconds."""

    def __init__(self, tensors: Mapping[str, np.ndarray], title: str):
        self._tensors = tensors
        self._bar = tqdm(total=len(tensors), desc=title, unit=" tensors", delay=SHOW_AFTER_SECONDS, leave=False)

    def __getitem__(self, name: str) -> np.ndarray:
        array = self._tensors[name]
        self._bar.update()
        return array

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __enter__(self) -> WithProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
