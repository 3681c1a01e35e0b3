"""Traces: another engine does the same again; two states compared."""

from __future__ import annotations

import dataclasses
import json
import stat

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import Request
from pagedjax.engine import LLM, TraceRecorder, diff_states, replay_trace
from pagedjax.engine.differences import diff_records
from pagedjax.errors import InvalidRequestError, SnapshotError
from tests.engine.tiny import make_engine, params, random_prompts

OPTIONS = {"cache__num_pages": 31, "cache__host_pages": 24, "cache__spill": True, "seed": 0}


def record(path):
    """A busy life: arrivals at any time, a refusal, a fork, an abort, swaps by measured cost. (tables after each step,
    engine)"""
    engine, tables = make_engine(**OPTIONS), []
    prompts = random_prompts(14, 5, 60, seed=70)
    with TraceRecorder(engine, path) as recorder:
        for i, prompt in enumerate(prompts):
            recorder.add_request(Request(str(i), prompt, params(max_tokens=20, temperature=1.0, n=1 + i % 2)))
            if i == 3:
                recorder.fork("0", "branch", params(max_tokens=9, temperature=1.0))
            if i == 5:
                with pytest.raises(InvalidRequestError):
                    recorder.add_request(Request("bad", (10**6,), params()))
                recorder.abort("2")
                engine.runner.mixed_rate.add(100.0, 1)  # from here on, to compute is dear
            recorder.step()
            tables.append(engine.runner.page_table())
        while recorder.has_unfinished():
            recorder.step()
            tables.append(engine.runner.page_table())
    return tables, engine


def test_a_replay_takes_the_same_pages(tmp_path):
    path = tmp_path / "trace.jsonl"
    tables, first = record(path)
    assert first.counters.swapped_in_pages > 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    second = make_engine(**OPTIONS)
    for step, _ in enumerate(replay_trace(path, second)):
        np.testing.assert_array_equal(second.runner.page_table(), tables[step], err_msg=f"step {step}")
    assert step == len(tables) - 1
    assert diff_states(first.runner.state, second.runner.state) is None
    counters = [dataclasses.replace(e.counters, warm_up_seconds=0.0) for e in (first, second)]
    assert counters[0] == counters[1]


def test_a_replay_that_goes_another_way_says_where(tmp_path):
    path = tmp_path / "trace.jsonl"
    record(path)
    lines = path.read_text().splitlines()
    step = next(i for i, line in enumerate(lines) if '"tokens": [["' in line)
    event = json.loads(lines[step])
    event["tokens"][0][2][0] += 1
    changed = tmp_path / "changed.jsonl"
    changed.write_text("\n".join([*lines[:step], json.dumps(event), *lines[step + 1 :]]))
    with pytest.raises(SnapshotError, match=f"changed.jsonl:{step + 1}: step {event['step']} goes another way"):
        list(replay_trace(changed, make_engine(**OPTIONS)))
    changed.write_text("\n".join(lines[:step]) + '\n{"step"')
    with pytest.raises(SnapshotError, match="damaged"):
        list(replay_trace(changed, make_engine(**OPTIONS)))
    with pytest.raises(SnapshotError, match="num_pages is 31 in the trace and 33"):
        list(replay_trace(path, make_engine(**{**OPTIONS, "cache__num_pages": 33})))
    with pytest.raises(SnapshotError, match="growth_share"):
        list(replay_trace(path, make_engine(**OPTIONS, scheduler__growth_share=0.5)))
    served = make_engine(**OPTIONS)
    served.add_request(Request("r", (9,), params()))
    with pytest.raises(ValueError, match="served nothing"):
        list(replay_trace(path, served))


def test_an_llm_can_be_recorded(tmp_path):
    engine = make_engine()
    with TraceRecorder(engine, tmp_path / "t") as recorder:
        out = LLM(engine=recorder, progress=False).generate([[9, 10, 11]], params(temperature=1.0))
    replayed = [o for outputs in replay_trace(tmp_path / "t", make_engine()) for o in outputs]
    assert [t for o in replayed for t in o.outputs[0].token_ids] == out[0].outputs[0].token_ids


def test_the_first_difference_is_named():
    state = make_engine().runner.state
    assert diff_states(state, state) is None
    other = state.replace(pages=state.pages.replace(ref_counts=state.pages.ref_counts.at[5].add(2).at[9].add(1)))
    found = diff_states(state, other)
    assert (found.name, found.index, found.first, found.second) == ("pages.ref_counts", (5,), 0, 2)
    assert str(found) == "pages.ref_counts[5]: 0 != 2"
    nan = jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), state.cache)
    assert diff_states(state.replace(cache=nan), state.replace(cache=nan)) is None
    assert diff_states(state, state.replace(cache=nan)).index == (0, 0, 0, 0, 0)
    assert diff_states({"x": np.zeros(3)}, {"x": -np.zeros(3)}).index == (0,)
    assert str(diff_states({"x": np.zeros(3)}, {"x": np.zeros(2)})) == "x: float64[3] != float64[2]"
    assert str(diff_states({"x": np.zeros(3)}, {})) == "x: there != missing"
    assert diff_records({"a": [1, {"b": 2}]}, {"a": [1, {"b": 2}]}) is None
    assert str(diff_records({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]})) == "a.1.b: 2 != 3"
