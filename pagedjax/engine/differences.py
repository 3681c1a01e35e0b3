"""Two states compared: the first difference, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

_CLOCK = ("clock", "arrived", "deadline_at")
"""Keys whose values are seconds on a clock of their own: two snapshots of one state are not taken at once."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where two states differ first.

    Attributes:
      name: of the leaf, dotted.
      index: of the first element that differs; empty where the leaf as a whole does.
      first, second: the two values.
    """

    name: str
    index: tuple[int, ...]
    first: Any
    second: Any

    def __str__(self) -> str:
        where = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        return f"{self.name}{where}: {self.first} != {self.second}"


def named_leaves(tree: Any) -> dict[str, Any]:
    """The arrays of a pytree by dotted name, such as pages.ref_counts."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def diff_states(a: Any, b: Any) -> Difference | None:
    """The first difference of two states, bit for bit; None where there is none.

    Args:
      a, b: `EngineState`s, other pytrees of arrays, or mappings from dotted names to arrays.
    """
    first = {name: np.asarray(jax.device_get(leaf)) for name, leaf in named_leaves(a).items()}
    second = {name: np.asarray(jax.device_get(leaf)) for name, leaf in named_leaves(b).items()}
    for name in {**first, **second}:
        if name not in first or name not in second:
            return Difference(name, (), *("there" if name in side else "missing" for side in (first, second)))
        if (difference := _diff_arrays(name, first[name], second[name])) is not None:
            return difference
    return None


def _diff_arrays(name: str, a: np.ndarray, b: np.ndarray) -> Difference | None:
    kinds = [f"{x.dtype}{list(x.shape)}" for x in (a, b)]
    if kinds[0] != kinds[1]:
        return Difference(name, (), *kinds)
    # Bytes, so that a NaN equals itself and -0 does not equal 0.
    differs = (_bytes(a) != _bytes(b)).any(axis=1)
    if not differs.any():
        return None
    flat = int(np.argmax(differs))
    index = tuple(int(i) for i in np.unravel_index(flat, a.shape))
    return Difference(name, index, a[index], b[index])


def _bytes(x: np.ndarray) -> np.ndarray:
    """u8[elements, bytes of one]"""
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8).reshape(x.size, x.dtype.itemsize)


def diff_records(a: Any, b: Any, name: str = "") -> Difference | None:
    """The same for JSON values, but for readings of the clock."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        pairs = [(str(key), a.get(key), b.get(key)) for key in {**a, **b} if key not in _CLOCK]
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = [(str(i), x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    else:
        return None if a == b else Difference(name, (), a, b)
    for key, x, y in pairs:
        if (difference := diff_records(x, y, f"{name}.{key}" if name else key)) is not None:
            return difference
    return None
