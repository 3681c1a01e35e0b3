"""Engines over pages as TPUs have them, K and V of a head in one row. Nothing is computed here."""

from __future__ import annotations

import functools

import pytest
from pagedjax_kernels import init_cache

from pagedjax.engine import diff_states, load_engine
from pagedjax.errors import SnapshotError
from tests.engine.tiny import make_engine


def test_a_snapshot_is_bound_to_its_layout(tmp_path, monkeypatch):
    for module in ("state", "sizing"):
        monkeypatch.setattr(f"pagedjax.runner.{module}.init_cache", functools.partial(init_cache, platform="tpu"))
    engine, again = make_engine(), make_engine()
    assert engine.runner.state.cache.paired
    assert engine.runner.state.cache.head_dim == 64  # of the model's 16: sizes follow from what is allocated
    engine.save(tmp_path / "s")
    load_engine(again, tmp_path / "s")
    assert diff_states(engine.runner.state, again.runner.state) is None
    monkeypatch.undo()
    with pytest.raises(SnapshotError, match="kv_layout is pairs in the snapshot and rows in this engine"):
        load_engine(make_engine(), tmp_path / "s")
