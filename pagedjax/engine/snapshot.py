"""The whole engine on disk: device state, host pool, queues, sequences in flight. This module is the engine's other half
and knows its insides.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from pagedjax_kernels.cache import Layout

from pagedjax.config import Config
from pagedjax.engine.differences import named_leaves
from pagedjax.engine.engine import Engine
from pagedjax.engine.host_index import DIGEST_BYTES, DevicePages, HostIndex
from pagedjax.engine.host_tier import HostTier, Saved
from pagedjax.engine.records import group_from, group_record
from pagedjax.engine.snapshot_files import Snapshot, check_files, read_description, read_snapshot, write_snapshot
from pagedjax.errors import SnapshotError
from pagedjax.options import options
from pagedjax.scheduler import Sequence
from pagedjax.types import FinishReason
from pagedjax.weights import LoadedModel

SECRET_LEAF = "pages.secret"
_SAMPLED_BYTES = 2**16
_BINDING = {
    "page_size": "cache.page_size",
    "num_pages": "cache.num_pages",
    "max_num_seqs": "scheduler.max_num_seqs",
    "host_pages": "cache.host_pages",
    "prefix_caching": "cache.prefix_caching",
    "spill": "cache.spill",
}
"""Entries of `engine_shape` that an option gives by itself."""
_UNSAVED = ("server.api_keys", "snapshot.load", "snapshot.save_on_exit")
"""Options that say nothing about the state, or must not be written down."""


def save_engine(engine: Engine, folder: str | os.PathLike[str]) -> None:
    """Writes everything that serving changed, between two steps. The engine goes on undisturbed.

    Args:
      engine: not in the middle of a step.
      folder: to be made; an existing snapshot there is replaced.

    Raises:
      SnapshotError: the folder holds something else.
      OSError: the disk is full, or the like.
    """
    engine._land_all()
    engine._tier.collect()
    state = engine.runner.state
    arrays = {f"state.{name}": leaf for name, leaf in named_leaves(state).items()}
    secret = np.asarray(jax.device_get(state.pages.secret))
    arrays[f"state.{SECRET_LEAF}"] = np.zeros_like(secret)
    arrays |= _tier_arrays(engine._tier)
    requests = {
        "scheduler": engine._scheduler.record(),
        "groups": [group_record(group) for group in engine._in_flight.groups.values()],
        "tier": _tier_record(engine._tier),
        "in_flight": engine._in_flight.record(),
        "counters": _counters_record(engine),
        "num_page_copies": engine.runner.num_page_copies,
    }
    description = {
        "model": model_identity(engine.loaded),
        "shape": engine_shape(engine),
        "config": {path: entry.value for path, entry in options(engine.config) if path not in _UNSAVED},
        "num_running": len(engine._scheduler.running),
        "num_waiting": len(engine._scheduler.waiting),
    }
    write_snapshot(Snapshot(description, requests, (int(secret[0]), int(secret[1])), arrays), folder)


def load_engine(engine: Engine, folder: str | os.PathLike[str], *, keep_requests: bool = True) -> None:
    """Makes an engine that has nothing in flight go on where a snapshot was taken.

    Args:
      engine: around the same model, of the same shape.
      folder: of the snapshot.
      keep_requests: go on with the requests in flight, too. Else only the cached pages remain, those of the requests
        among them, and counting starts anew.

    Raises:
      SnapshotError: the snapshot is damaged, or of another model or shape.
      ValueError: the engine has requests in flight.
    """
    if engine.has_unfinished():
        raise ValueError(f"engine: must have nothing in flight, got {len(engine.request_ids)} requests")
    engine._land_all()
    snapshot = read_snapshot(folder)
    _check(engine, snapshot, Path(folder))
    _load_state(engine, snapshot)
    record = snapshot.requests
    groups = [group_from(entry, engine.loaded, max_model_len=engine.max_model_len) for entry in record["groups"]]
    by_rank = engine._in_flight.load(record["in_flight"], groups)
    engine._scheduler.load(record["scheduler"], by_rank)
    engine._in_flight.load_deadlines()
    _load_tier(engine._tier, record["tier"], snapshot.arrays, by_rank)
    if keep_requests:
        _load_counters(engine, record["counters"])
        return
    for request_id in engine.request_ids:
        engine.abort(request_id)
    _load_counters(engine, {})


def saved_options(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The configuration that a snapshot was taken under, by dotted name; pages counted out where they were chosen.

    Raises:
      SnapshotError: no snapshot there, or a damaged one.
    """
    description = read_description(folder)
    known = {path for path, _ in options(Config())}
    found = {k: tuple(v) if isinstance(v, list) else v for k, v in description["config"].items() if k in known}
    return found | {"cache.num_pages": description["shape"]["num_pages"]}


def check_options(folder: str | os.PathLike[str], config: Config) -> None:
    """Finds what would keep a configuration from loading a snapshot, as far as files and options tell: before minutes of
    loading and compiling.

    Raises:
      SnapshotError: names the option, its value and the snapshot's.
    """
    description = read_description(folder)
    check_files(Path(folder).expanduser().absolute(), description)
    known = dict(options(config))
    for name, path in _BINDING.items():
        found, wanted = description["shape"][name], known[path].value
        if found != wanted and (path, wanted) != ("cache.num_pages", 0):
            raise SnapshotError(
                f"config.snapshot.load: {folder} was made with config.{path} = {found}, now it is {wanted}; they must be the "
                "same"
            )


def model_identity(loaded: LoadedModel) -> dict[str, Any]:
    """What must be the same for cached keys and values to mean the same: architecture and weights (a digest of samples)."""
    digest = hashlib.blake2b(digest_size=16)
    leaves = named_leaves(nnx.to_pure_dict(nnx.state(loaded.model)))
    for name in sorted(leaves):
        array = np.asarray(jax.device_get(leaves[name]))
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(flat[:: max(1, flat.size // _SAMPLED_BYTES) | 1].tobytes())
    return {"name": loaded.name, "architecture": loaded.spec.architecture, "weights": digest.hexdigest()}


def engine_shape(engine: Engine) -> dict[str, Any]:
    """Sizes and options that a state is bound to."""
    runner, config = engine.runner, engine.config
    cache = runner.state.cache
    # Snapshots that do not say are of the usual allocation.
    allocation = {} if runner.allocation.is_paged else {"allocation": dataclasses.asdict(runner.allocation)}
    return allocation | {
        "page_size": runner.page_size,
        "num_pages": runner.num_usable_pages + 1,
        "max_num_seqs": runner.max_rows,
        "max_model_len": runner.max_len,
        "cache_dtype": str(cache.dtype),
        "kv_layout": cache.layout.value,
        "kv_pages": list(cache.kv_pages.shape),
        "host_pages": config.cache.host_pages,
        "prefix_caching": config.cache.prefix_caching,
        "spill": config.cache.spill,
        "hash_bits": runner.state.pages.hash_bits,
    }


def _check(engine: Engine, snapshot: Snapshot, folder: Path) -> None:
    theirs, ours = snapshot.description["model"], model_identity(engine.loaded)
    if theirs["weights"] != ours["weights"] or theirs["architecture"] != ours["architecture"]:
        what = "with other weights" if theirs["name"] == ours["name"] else f"not {ours['name']!r}"
        raise SnapshotError(
            f"{folder}: a snapshot of model {theirs['name']!r} (weights {theirs['weights']}), {what} "
            f"(weights {ours['weights']})"
        )
    # Snapshots from before there were layouts are of rows.
    found, wanted = {"kv_layout": Layout.ROWS.value, **snapshot.description["shape"]}, engine_shape(engine)
    for name in {**wanted, **found}:
        if found.get(name) != wanted.get(name):
            raise SnapshotError(
                f"{folder}: {name} is {found.get(name)} in the snapshot and {wanted.get(name)} in this engine; they must be "
                "the same"
            )


def _load_state(engine: Engine, snapshot: Snapshot) -> None:
    leaves, structure = jax.tree_util.tree_flatten(engine.runner.state)
    loaded = []
    for name, leaf in zip(named_leaves(engine.runner.state), leaves, strict=True):
        array = snapshot.arrays.get(f"state.{name}")
        kind = None if array is None else (array.shape, array.dtype)
        if kind != (leaf.shape, leaf.dtype):
            raise SnapshotError(f"state.{name}: the snapshot has {kind}, this engine {(leaf.shape, leaf.dtype)}")
        value = np.array(snapshot.secret, np.uint32) if name == SECRET_LEAF else array
        # A copy: the state will be donated, and memory of numpy must not be.
        loaded.append(jnp.array(value, copy=True))
    state = jax.tree_util.tree_unflatten(structure, loaded)
    engine.runner.load_state(
        state, num_unowned=int(state.pages.num_unowned), num_page_copies=snapshot.requests["num_page_copies"]
    )


def _counters_record(engine: Engine) -> dict[str, Any]:
    values = dataclasses.asdict(engine.counters)
    values["requests_finished"] = {str(reason): n for reason, n in engine.counters.requests_finished.items()}
    del values["warm_up_seconds"]  # of that process
    return values


def _load_counters(engine: Engine, record: dict[str, Any]) -> None:
    fresh = type(engine.counters)(warm_up_seconds=engine.counters.warm_up_seconds)
    finished: dict[str, int] = {FinishReason(reason): n for reason, n in record.get("requests_finished", {}).items()}
    fresh.requests_finished.update(finished)
    known = {name: value for name, value in record.items() if name in vars(fresh) and name != "requests_finished"}
    for name, value in (vars(fresh) | known).items():
        setattr(engine.counters, name, value)


# The host tier


def _used_pages(tier: HostTier) -> list[int]:
    tails = [page for saved in tier.saved.values() for page in saved.last_pages]
    return sorted([page for _, page, _ in tier.index.entries()] + tails)


def _tier_arrays(tier: HostTier) -> dict[str, Any]:
    published = tier.published.entries()
    pages = np.array([page for page, _, _ in published], np.int32)
    generations = np.array([generation for _, generation, _ in published], np.uint32)
    digests = np.frombuffer(b"".join(d for _, _, d in published), np.uint8).reshape(-1, DIGEST_BYTES)
    out: dict[str, Any] = {
        "tier.published.pages": pages,
        "tier.published.generations": generations,
        "tier.published.digests": digests,
    }
    if tier.swapper is not None:
        used = _used_pages(tier)
        out |= {f"tier.pool.{name}": leaf[used] for name, leaf in named_leaves(tier.swapper.pool.arrays).items()}
    return out


def _tier_record(tier: HostTier) -> dict[str, Any]:
    return {
        "pages": _used_pages(tier),
        "index": [[digest.hex(), page, holders] for digest, page, holders in tier.index.entries()],
        "saved": [
            [s.rank, saved.num_computed, [d.hex() for d in saved.digests], saved.last_pages]
            for s, saved in tier.saved.items()
        ],
    }


def _load_tier(tier: HostTier, record: dict[str, Any], arrays: Any, by_rank: dict[int, Sequence]) -> None:
    tier.index = HostIndex.of([(bytes.fromhex(digest), page, holders) for digest, page, holders in record["index"]])
    tier.saved = {
        by_rank[rank]: Saved(num_computed, [bytes.fromhex(d) for d in digests], last_pages)
        for rank, num_computed, digests, last_pages in record["saved"]
    }
    names = ("pages", "generations", "digests")
    pages, generations, digests = (arrays[f"tier.published.{name}"] for name in names)
    tier.published = DevicePages(
        (page, generation, digest.tobytes())
        for page, generation, digest in zip(pages.tolist(), generations.tolist(), digests, strict=True)
    )
    if tier.swapper is not None:
        pool = tier.swapper.pool
        pool.use(record["pages"])
        for name, leaf in named_leaves(pool.arrays).items():
            leaf[record["pages"]] = arrays[f"tier.pool.{name}"]
