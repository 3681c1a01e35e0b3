"""Layer groups: layers that see alike share a page table; all groups take their pages from one pool.

A page of the pool holds the keys and values of S tokens in the layers of *one* group, so groups are equally large: as
large as the rarest kind of layer. Gemma 3 270M has 15 layers with a window of 512 tokens and 3 that see everything: 6
groups of 3 layers, and 5 of the 6 tables need no more than the window.
"""

from __future__ import annotations

import collections
from typing import NamedTuple


class LayerGroups(NamedTuple):
    """Attributes:
    windows: a group's window in tokens, the query itself included; 0: all. One entry a group, G of them.
    group: i per layer, the group it belongs to.
    place: i per layer, where in its group's cache it is.
    num_places: layers that a group's cache has room for; a group may have fewer.
    """

    windows: tuple[int, ...]
    group: tuple[int, ...]
    place: tuple[int, ...]
    num_places: int


def layer_groups(num_layers: int, windows: tuple[int, ...]) -> LayerGroups:
    """Groups for a model with these windows, one entry a layer (see ModelSpec.windows; empty: all see all)."""
    windows = windows or (0,) * num_layers
    counts = collections.Counter(windows)
    num_places = min(counts.values())
    first: dict[int, int] = {}  # first group of each kind of layer
    of_group: list[int] = []
    for window in sorted(counts):
        first[window] = len(of_group)
        of_group += [window] * -(-counts[window] // num_places)
    seen: collections.Counter[int] = collections.Counter()
    group, place = [], []
    for window in windows:
        group.append(first[window] + seen[window] // num_places)
        place.append(seen[window] % num_places)
        seen[window] += 1
    return LayerGroups(tuple(of_group), tuple(group), tuple(place), num_places)
