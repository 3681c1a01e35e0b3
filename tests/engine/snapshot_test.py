"""Snapshots: an engine that was saved in mid-flight goes on token for token, page for page."""

from __future__ import annotations

import json
import shutil
import stat

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import Request, snapshot
from pagedjax.engine import diff_states, from_loaded, load_engine, restore_engine
from pagedjax.engine.build import build_engine
from pagedjax.engine.llm import merge
from pagedjax.engine.snapshot_files import read_snapshot
from pagedjax.errors import SnapshotError
from pagedjax.models import Llama
from pagedjax.options import with_overrides
from pagedjax.scheduler import Phase
from pagedjax.weights import LoadedModel
from tests.engine import tiny
from tests.engine.swap_test import assert_nothing_left, preempt
from tests.engine.tiny import make_engine, params, random_prompts, run, tokens
from tests.models.harness import random_checkpoint, tiny_spec
from tests.server.fakes import TOKENIZER


def add_all(engine):
    """Everything at once: greedy, sampled, penalties, n > 1, beams, log-probabilities, too many for rows and pages."""
    prompts = random_prompts(11, 5, 60, seed=60)
    many = [
        params(max_tokens=30),
        params(max_tokens=25, temperature=1.0, seed=2**63 + 5, presence_penalty=1.0),
        params(max_tokens=20, n=3, temperature=0.8, seed=4, logprobs=2),
        params(max_tokens=28, temperature=1.0),
        params(max_tokens=18, prompt_logprobs=1, logit_bias={9: 1.5}, stop_token_ids=[11, 12]),
        params(max_tokens=12, n=2, beam_width=2),
        *[params(max_tokens=22, temperature=1.0, repetition_penalty=1.2) for _ in range(5)],
    ]
    for i, (prompt, one) in enumerate(zip(prompts, many, strict=True)):
        engine.add_request(Request(str(i), prompt, one, cache_salt="ab"[i % 2]))


def finish(engine, done):
    for _ in range(1000):
        if not engine.has_unfinished():
            return done
        for delta in engine.step():
            done[delta.request_id] = merge(done.get(delta.request_id), delta)
    raise AssertionError("the engine does not come to an end")


def steps(engine, num, done):
    for _ in range(num):
        for delta in engine.step():
            done[delta.request_id] = merge(done.get(delta.request_id), delta)


def busy_engine():
    engine = make_engine(cache__num_pages=31, cache__host_pages=24, scheduler__preemption="swap", cache__spill=True)
    done = {}
    run(engine, random_prompts(3, 20, 60, seed=61), params(max_tokens=4))  # something in the caches
    add_all(engine)
    steps(engine, 4, done)
    while not engine._tier.saved:
        preempt(engine)
    return engine, done


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, the engine that was saved and its outputs up to there)"""
    engine, done = busy_engine()
    phases = {s.phase for s in engine._in_flight.continuations}
    assert {Phase.WAITING, Phase.DECODE} <= phases
    assert engine._tier.saved
    folder = tmp_path_factory.mktemp("snapshots") / "one"
    engine.save(folder)
    return folder, engine, done


def test_a_restored_engine_goes_on_token_for_token(saved, tmp_path):
    folder, engine, done = saved
    copy = {k: merge(None, v) for k, v in done.items()}
    restored = tiny.share_programs(restore_engine(folder, tiny.loaded(), progress=False))
    assert restored.runner.check() == []
    assert diff_states(restored.runner.state, engine.runner.state) is None
    assert restored.request_ids == engine.request_ids
    assert restored.counters == engine.counters
    restored.save(tmp_path / "again")
    assert snapshot.diff_snapshots(read_snapshot(folder), read_snapshot(tmp_path / "again")) is None

    for each in (engine, restored):  # how long dispatches last is a matter of the clock, and pages go with it
        each.choices.hook = lambda name, value: 5 if name == "max_steps" else value
    one, two = finish(engine, done), finish(restored, copy)
    assert one == two  # tokens, log-probabilities, reasons
    assert len(one) == 11
    assert diff_states(restored.runner.state, engine.runner.state) is None  # the same pages, too
    assert restored.counters == engine.counters
    for each in (engine, restored):
        assert_nothing_left(each)
    # And both go on alike with what comes then: seeds, ranks and namespaces were restored as well.
    after = [tokens(run(e, random_prompts(3, 20, 60, seed=61), params(temperature=1.0))) for e in (engine, restored)]
    assert after[0] == after[1]


def test_an_uninterrupted_run_gives_the_same(saved):
    _, interrupted, done = saved
    finish(interrupted, done)
    engine, calm = make_engine(), {}
    run(engine, random_prompts(3, 20, 60, seed=61), params(max_tokens=4))
    add_all(engine)
    finish(engine, calm)
    for name, out in calm.items():
        assert [o.token_ids for o in out.outputs] == [o.token_ids for o in done[name].outputs]


def test_files_are_for_the_owner_only(saved):
    folder, engine, _ = saved
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for name in ("secret.json", "requests.json"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    secret = np.asarray(jax.device_get(engine.runner.state.pages.secret)).tolist()
    assert json.loads((folder / "secret.json").read_text()) == secret
    assert not read_snapshot(folder).arrays["state.pages.secret"].any()


def test_only_the_cache_where_requests_are_not_kept(saved):
    folder, _, _ = saved
    options = {"cache__num_pages": 31, "cache__host_pages": 24, "scheduler__preemption": "swap", "cache__spill": True}
    engine = make_engine(**options)
    load_engine(engine, folder, keep_requests=False)
    assert_nothing_left(engine)
    stats = engine.stats()
    assert stats.pages_cached > 0
    assert (stats.requests_finished, stats.generation_tokens) == ({}, 0)
    prompt = random_prompts(11, 5, 60, seed=60)[1]
    out = run(engine, [prompt], params(max_tokens=3), cache_salt="b")[0]
    assert out.num_cached_tokens == len(prompt) - 1
    assert run(engine, [prompt], params(max_tokens=3), cache_salt="other")[0].num_cached_tokens == 0


def test_another_model_or_shape_is_refused(saved):
    folder, _, _ = saved
    other = LoadedModel(
        Llama.load(tiny.SPEC, random_checkpoint(tiny.SPEC, seed=4), jnp.float32), tiny.SPEC, None, "odd"
    )
    with pytest.raises(SnapshotError, match=r"model 'tiny' .*not 'odd'"):
        restore_engine(folder, other, progress=False)
    for option, value, words in (
        ("cache__num_pages", 33, "num_pages is 31 in the snapshot and 33"),
        ("scheduler__max_num_seqs", 4, "max_num_seqs is 8 .* and 4"),
        ("cache__dtype", "bfloat16", "cache_dtype is float32 .* and bfloat16"),
        ("cache__host_pages", 5, "host_pages is 24 .* and 5"),
    ):
        options = {"cache__num_pages": 31, "cache__host_pages": 24, "scheduler__preemption": "swap"}
        with pytest.raises(SnapshotError, match=words):
            load_engine(make_engine(**{**options, "cache__spill": True, option: value}), folder)
    busy = make_engine()
    busy.add_request(Request("r", (9,), params()))
    with pytest.raises(ValueError, match="nothing in flight"):
        load_engine(busy, folder)


def test_damage_is_found(saved, tmp_path):
    folder, _, _ = saved
    with pytest.raises(SnapshotError, match="no snapshot there"):
        restore_engine(tmp_path, tiny.loaded(), progress=False)
    for name, words in (("requests.json", "cannot be read"), ("arrays", "is missing|instead of")):
        copy = tmp_path / name.split(".")[0]
        shutil.copytree(folder, copy)
        victim = copy / name
        if victim.is_dir():
            victim = max((p for p in victim.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        victim.write_bytes(victim.read_bytes()[:-10])
        with pytest.raises(SnapshotError, match=words):
            read_snapshot(copy)
    description = json.loads((folder / "snapshot.json").read_text())
    (copy / "snapshot.json").write_text(json.dumps({**description, "format": 99}))
    with pytest.raises(SnapshotError, match="format 99"):
        read_snapshot(copy)


def test_only_snapshots_are_overwritten(saved, tmp_path):
    _, engine, _ = saved
    engine.save(tmp_path / "s")
    engine.save(tmp_path / "s")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(SnapshotError, match="not a snapshot"):
        engine.save(tmp_path / "other")


def test_text_goes_on_where_it_was(tmp_path):
    """Stop strings and characters that are half out, by their token ids."""
    spec = tiny_spec(num_layers=2, vocab_size=258, max_position_embeddings=256)
    model = Llama.load(spec, random_checkpoint(spec, seed=3), jnp.float32)
    loaded = LoadedModel(model, spec, TOKENIZER, "bytes", (TOKENIZER.eos_token_id,))
    engine = from_loaded(loaded, make_engine().config, progress=False)
    engine.choices.hook = lambda name, value: 1  # a token a step
    probe = run(engine, [(65, 66)], params(max_tokens=40, detokenize=True, temperature=1.0, seed=3))[0].outputs[0]
    stop = probe.text[12:15]
    sampling = params(max_tokens=40, detokenize=True, temperature=1.0, seed=3, stop=[stop, probe.text[30:] + "?"])
    expected = run(engine, [(65, 66)], sampling)[0].outputs[0]
    assert expected.stop_reason == stop
    for num in range(1, 14, 3):
        done = {}
        engine.add_request(Request("r", (65, 66), sampling))
        steps(engine, num, done)
        engine.save(tmp_path / str(num))
        engine.abort("r")
        restored = tiny.share_programs(restore_engine(tmp_path / str(num), loaded, progress=False))
        assert finish(restored, done)["r"].outputs[0] == expected


def test_an_engine_is_built_with_a_warm_cache(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("pagedjax.engine.build.load_model", lambda path, dtype: tiny.loaded())
    first = make_engine()
    prompt = random_prompts(1, 30, 31, seed=65)[0]
    run(first, [prompt], params(max_tokens=2))
    config = with_overrides(first.config, {"snapshot.load": str(tmp_path / "s"), "cache.num_pages": 0})
    cold = build_engine(with_overrides(config, {"cache.num_pages": 65}), progress=False)
    assert "does not exist" in caplog.text
    assert run(cold, [prompt], params(max_tokens=2))[0].num_cached_tokens == 0
    first.save(tmp_path / "s")
    warm = build_engine(config, progress=False)  # as many pages as the snapshot has
    assert run(warm, [prompt], params(max_tokens=2))[0].num_cached_tokens == 29
    monkeypatch.setattr(
        "pagedjax.engine.build.load_model", None
    )  # what options tell is found before anything is loaded
    for option, value in (("cache.page_size", 16), ("cache.num_pages", 33), ("scheduler.max_num_seqs", 3)):
        with pytest.raises(SnapshotError, match=rf"config.{option} = \d+, now it is {value}"):
            build_engine(with_overrides(config, {option: value}), progress=False)
    with pytest.raises(SnapshotError, match="cannot be written"):
        first.save("/proc/nothing/s")
    monkeypatch.setattr("pagedjax.engine.build.load_model", lambda path, dtype: tiny.loaded())
    again = restore_engine(tmp_path / "s", config, progress=False)
    assert diff_states(again.runner.state, first.runner.state) is None


def test_the_command(saved, tmp_path, capsys):
    folder, engine, _ = saved
    engine.save(tmp_path / "later")
    assert snapshot.main(["snapshot", "show", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "model: tiny" in text
    assert "num_pages 31" in text
    assert "requests in flight: 11" in text
    assert snapshot.main(["snapshot", "diff", str(folder), str(folder)]) == 0
    assert capsys.readouterr().out == "the same\n"
    assert snapshot.main(["snapshot", "diff", str(folder), str(tmp_path / "later")]) == 1
    assert " != " in capsys.readouterr().out
    assert snapshot.main(["snapshot", "show", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_secrets_are_not_written_down(tmp_path):
    engine = make_engine(server__api_keys=("do-not-tell",))
    engine.save(tmp_path / "s")
    assert all(b"do-not-tell" not in p.read_bytes() for p in (tmp_path / "s").rglob("*") if p.is_file())
