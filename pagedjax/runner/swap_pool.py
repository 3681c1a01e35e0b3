"""Pages in host memory: bounded, allocated once, handed out by number."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from pagedjax_kernels import KVCache


class SwapPool:
    """H pages of the KV cache in numpy arrays. Knows nothing of what they are for.

    Args:
      cache: the device's pages, for shapes and dtypes: leaves [L, N, ...].
      num_pages: H; 0 for no pool.

    Attributes:
      arrays: KVCache of numpy arrays [H, L, ...].
    """

    def __init__(self, cache: KVCache, num_pages: int) -> None:
        self.num_pages = num_pages

        # Zeroed lazily by the operating system: memory is used as pages are.
        def room(leaf: jax.Array) -> np.ndarray:
            return np.zeros((num_pages, leaf.shape[0], *leaf.shape[2:]), leaf.dtype)

        self.arrays: KVCache = jax.tree.map(room, cache)
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.arrays))

    def take(self) -> int:
        """A free page. There must be one."""
        return self._free.pop()

    def give(self, page: int) -> None:
        """Take a page back."""
        self._free.append(page)

    def write(self, pages: Sequence[int], blocks: KVCache) -> None:
        """Fill pages with the first len(pages) of `blocks` (leaves [W, L, ...])."""

        def put(array: np.ndarray, block: np.ndarray) -> None:
            array[list(pages)] = block[: len(pages)]

        jax.tree.map(put, self.arrays, blocks)

    def read(self, pages: Sequence[int], width: int) -> KVCache:
        """Copies of pages: leaves [width, L, ...]; what lies beyond len(pages) is page 0's."""
        padded = [*pages, *[0] * (width - len(pages))]
        return jax.tree.map(lambda array: array[padded], self.arrays)

    def use(self, pages: Sequence[int]) -> None:
        """Mark exactly these pages as handed out, for a pool that is being restored."""
        used = set(pages)
        self._free = [page for page in range(self.num_pages - 1, -1, -1) if page not in used]
