"""Looks into snapshots of an engine.

python -m pagedjax.snapshot show FOLDER
python -m pagedjax.snapshot diff FOLDER OTHER    (exit status 0: the same, 1: they differ, 2: an error)
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import jax
import numpy as np
from absl import app

from pagedjax.engine.differences import Difference, diff_records, diff_states
from pagedjax.engine.snapshot_files import Snapshot, read_snapshot
from pagedjax.errors import PagedJaxError

_TIMES = ("clock", "arrived", "deadline_at")
"""Readings of a clock: no two snapshots have the same."""


def _without_times(record: Any) -> Any:
    if isinstance(record, dict):
        return {key: _without_times(value) for key, value in record.items() if key not in _TIMES}
    return [_without_times(value) for value in record] if isinstance(record, list) else record


def diff_snapshots(a: Snapshot, b: Snapshot) -> Difference | None:
    """The first difference: of what they belong to, of the arrays, of requests and queues. Times of day do not count."""
    for part in ("model", "shape"):
        if (found := diff_records(a.description[part], b.description[part], part)) is not None:
            return found
    if (found := diff_states(a.arrays, b.arrays)) is not None:
        return found
    first, second = ({"requests": _without_times(x.requests), "secret": x.secret} for x in (a, b))
    return diff_records(first, second)


def describe(snapshot: Snapshot) -> str:
    """A snapshot in a few lines."""
    model, shape, record = snapshot.description["model"], snapshot.description["shape"], snapshot.requests
    counts, parent = snapshot.arrays["state.pages.ref_counts"][1:], snapshot.arrays["state.pages.parent"][1:]
    cached = int(np.sum((counts == 0) & (parent != 0)))
    owned = int(np.sum(counts > 0))
    size = sum(array.nbytes for array in snapshot.arrays.values())
    lines = [
        f"model: {model['name']} ({model['architecture']}, weights {model['weights']})",
        "shape: " + ", ".join(f"{name} {value}" for name, value in shape.items()),
        f"pages: {owned} owned, {cached} cached, {counts.size - owned - cached} free",
        f"host pages: {len(record['tier']['pages'])} used, {len(record['tier']['saved'])} sequences swapped out",
        f"requests in flight: {len(record['groups'])}",
    ]
    for group in record["groups"]:
        sequences = [c["sequence"] for c in group["continuations"]]
        phases = Counter(sequence["phase"] for sequence in sequences)
        tokens = ", ".join(str(len(sequence["known_ids"])) for sequence in sequences)
        states = ", ".join(f"{count} {phase}" for phase, count in phases.items())
        lines.append(f"  {group['request']['request_id']}: {states}; {tokens} tokens")
    return "\n".join([*lines, f"size: {size / 1e6:,.1f} MB"])


def main(argv: list[str]) -> int:
    command, folders = (argv[1] if len(argv) > 1 else ""), argv[2:]
    if (command, len(folders)) not in (("show", 1), ("diff", 2)):
        raise app.UsageError("show FOLDER, or diff FOLDER OTHER", exitcode=2)
    try:
        snapshots = [read_snapshot(folder) for folder in folders]
    except (PagedJaxError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if command == "show":
        print(describe(snapshots[0]))
        return 0
    difference = diff_snapshots(*snapshots)
    print("the same" if difference is None else str(difference))
    return int(difference is not None)


if __name__ == "__main__":
    # Arrays are only looked at: an accelerator would be claimed for nothing.
    jax.config.update("jax_platforms", "cpu")
    app.run(main)
