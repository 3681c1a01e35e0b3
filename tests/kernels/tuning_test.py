"""Which configuration a kernel gets: files, their order, what is wrong with one, and what it must not depend on."""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from pagedjax_kernels import native_cpu, paged_attention, tuning
from pagedjax_kernels.hardware import Hardware, current_hardware
from pagedjax_kernels.native_cpu.ops import attention_tiling
from pagedjax_kernels.paged_attention import triton, xla_decode, xla_prefill
from pagedjax_kernels.paged_attention.case import AttentionCase

from tests.kernels.harness import make_call

CASE = AttentionCase(64, 64, 40, 32, 8, 128, 128, 16, "bfloat16", "int8", None, 0.1, None, "none", False)
SHAPE = {"q_dtype": "bfloat16", "kv_dtype": "int8", "head_dim": 128, "group": 4, "page_size": 16}
DECODE = {"block_n": 128, "warps": 2, "stages": 2, "splits": 8, "min_span": 512}
TILINGS = {
    "triton.decode": (triton.decode_tiling, DECODE),
    "triton.prefill": (triton.prefill_tiling, {"block_m": 32, "block_n": 128, "warps": 2, "stages": 2}),
    "xla.decode": (xla_decode.decode_tiling, {"rows": 3, "block_tokens": 48}),
    "xla.prefill": (xla_prefill.prefill_tiling, {"tile_queries": 24, "block_tokens": 80}),
    "native_cpu.attention": (attention_tiling, {"chunk": 192}),
}
GPU = Hardware("gpu", "NVIDIA H200", (9, 0))


def report(**changes) -> dict:
    """A right file's content, or that of one with another entry."""
    entry = {"kernel": "triton.decode", "shape": SHAPE, "config": DECODE, **changes}
    return {"device": GPU.kind, "tuned": [entry], "measured_on": {"jax": "0.12"}}


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """(shipped, user's) folders of tuned files, empty; the device is a GPU, and nothing was read yet."""
    shipped, users = tmp_path / "package", tmp_path / "cache" / "tuned"
    shipped.mkdir()
    users.mkdir(parents=True)
    monkeypatch.setattr(tuning, "SHIPPED", shipped)
    monkeypatch.setattr(tuning, "current_hardware", lambda: GPU)
    monkeypatch.setenv("PAGEDJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PAGEDJAX_TUNED", raising=False)
    tuning._tables.cache_clear()
    yield shipped, users
    tuning._tables.cache_clear()


def write(folder, data) -> None:
    text = data if isinstance(data, str) else json.dumps(data)
    (folder / tuning.file_name(GPU.kind)).write_text(text)


def test_every_kernel_takes_the_fields_that_can_be_tuned():
    assert TILINGS.keys() == tuning.KERNELS.keys()
    for kernel, (tiling, config) in TILINGS.items():
        with tuning.forced({}):
            heuristics = tiling(CASE)
        with tuning.forced({kernel: config}):
            assert tiling(CASE) == heuristics._replace(**config) != heuristics
        fields = {name: getattr(heuristics, name) for name in tuning.KERNELS[kernel].knobs}
        assert tuning.problem(kernel, CASE.shape_class, fields) is None, "what heuristics say must be allowed"


def test_shipped_files_are_right():
    for path in tuning.SHIPPED.glob("*.json"):
        device = json.loads(path.read_text())["device"]
        assert path.name == tuning.file_name(device)
        assert tuning.parse(path.read_text(), device)


def test_heuristics_the_shipped_file_and_the_users(folders, monkeypatch):
    shipped, users = folders
    heuristics = triton.decode_tiling(CASE)
    write(shipped, report())
    tuning._tables.cache_clear()
    assert triton.decode_tiling(CASE) == heuristics._replace(**DECODE)
    assert triton.decode_tiling(CASE._replace(page_size=32)).block_n == heuristics.block_n, "another class"
    write(users, report(config={**DECODE, "warps": 8}))
    assert triton.decode_tiling(CASE).warps == 2, "read once in a process"
    tuning._tables.cache_clear()
    assert triton.decode_tiling(CASE).warps == 8
    monkeypatch.setenv("PAGEDJAX_TUNED", "0")
    assert triton.decode_tiling(CASE) == heuristics


@pytest.mark.parametrize(
    ("message", "data"),
    [
        ("Expecting value", "no JSON"),
        ("the file: must be an object", []),
        ("the file: lacks device", {"tuned": []}),
        ("the file: has unknown fields speed; known: device, measured_on, tuned", {**report(), "speed": 1}),
        ("device: must be 'NVIDIA H200', got 'NVIDIA L4'", {**report(), "device": "NVIDIA L4"}),
        ("tuned: must be a list", {**report(), "tuned": {}}),
        (r"tuned\[0\]: must be an object", {**report(), "tuned": [3]}),
        (r"tuned\[0\]: has unknown fields note", report(note=1)),
        (r"tuned\[0\].kernel: must be one of triton.decode, .*, got \['x'\]", report(kernel=["x"])),
        (r"tuned\[0\].shape: has unknown fields batch", report(shape={**SHAPE, "batch": 8})),
        (r"tuned\[0\].shape.group: must be at least 1, got True", report(shape={**SHAPE, "group": True})),
        (r"tuned\[0\].shape.q_dtype: must be a name, got 16", report(shape={**SHAPE, "q_dtype": 16})),
        (r"tuned\[0\].config: must be an object", report(config=1)),
        (r"tuned\[0\].config: must have the fields block_n, warps", report(config={"block_n": 64})),
        (r"config: block_n must be a power of two, got 48", report(config={**DECODE, "block_n": 48})),
        (r"config: block_n must be in \[16, 256\], got 512", report(config={**DECODE, "block_n": 512})),
        (r"config: warps must be an integer, got 4.0", report(config={**DECODE, "warps": 4.0})),
        (r"config: min_span must be a multiple of 16, got 300", report(config={**DECODE, "min_span": 300})),
        ("min_span must be a multiple of block_n = 128, got 320", report(config={**DECODE, "min_span": 320})),
        (
            "block_m must be at least the group of 40 heads, got 32",
            report(kernel="triton.prefill", config=TILINGS["triton.prefill"][1], shape={**SHAPE, "group": 40}),
        ),
        (r"tuned\[1\]: is the second for triton.decode", {**report(), "tuned": report()["tuned"] * 2}),
    ],
)
def test_a_wrong_file_is_reported_once_and_ignored(message, data, folders, caplog):
    shipped, users = folders
    heuristics = triton.prefill_tiling(CASE)
    tuning._tables.cache_clear()
    write(shipped, report(kernel="triton.prefill", config=TILINGS["triton.prefill"][1]))
    write(users, data)
    caplog.set_level(logging.WARNING, "pagedjax_kernels")
    for _ in range(2):
        assert triton.prefill_tiling(CASE) == heuristics._replace(**TILINGS["triton.prefill"][1])
        triton.decode_tiling(CASE)
    assert len(caplog.records) == 1
    text = caplog.records[0].getMessage()
    assert "nvidia-h200.json is ignored" in text
    with pytest.raises(ValueError, match=message):
        tuning.parse((users / "nvidia-h200.json").read_text(), GPU.kind)


def test_a_file_that_cannot_be_read_stops_nothing(folders, caplog):
    (folders[1] / tuning.file_name(GPU.kind)).mkdir()
    assert triton.decode_tiling(CASE) is not None
    assert "is ignored" in caplog.text


def test_names_of_devices_and_files():
    assert tuning.file_name("NVIDIA A100-SXM4-40GB") == "nvidia-a100-sxm4-40gb.json"
    assert tuning.file_name("TPU v5e / 2") == "tpu-v5e-2.json"
    assert tuning.device_name(GPU) == "NVIDIA H200"
    assert tuning.device_name(Hardware("cpu", "cpu")) != "cpu"


def test_a_configuration_does_not_depend_on_the_batch(folders):
    """Whatever rows, tokens and width of the page table a call has: else a row's bits would depend on its batch mates."""
    entries = [{"kernel": k, "shape": SHAPE, "config": config} for k, (_, config) in TILINGS.items()]
    write(folders[0], {**report(), "tuned": entries})
    assert not {"num_rows", "num_tokens", "max_pages", "max_q_len"} & set(tuning.ShapeClass._fields)
    for tiling, config in TILINGS.values():
        found = {
            tiling(CASE._replace(num_rows=rows, num_tokens=tokens, max_pages=width, max_q_len=limit))
            for rows in (1, 64)
            for tokens in (64, 4096)
            for width in (1, 4000)
            for limit in (1, None)
        }
        assert len(found) == 1
        assert config.items() <= found.pop()._asdict().items()


BACKENDS = {"xla": ("xla.decode", "xla.prefill"), "native_cpu": ("native_cpu.attention",)}


@pytest.mark.parametrize("backend", BACKENDS)
def test_odd_sizes_change_neither_results_nor_their_independence(backend):
    """Blocks that divide neither pages nor rows: against the oracle, and bit for bit alone as together."""
    if backend == "native_cpu" and (reason := native_cpu.why_not()):
        pytest.skip(reason)
    call = make_call([1, 70, 1, 1, 9], [450, 130, 3, 200, 9], page_size=8)
    with tuning.forced({kernel: TILINGS[kernel][1] for kernel in BACKENDS[backend]}):
        run = jax.jit(lambda *args: paged_attention(*args, backend=backend))
        together = np.asarray(run(*call.args))
        np.testing.assert_allclose(together, call.expected(), rtol=0, atol=1e-5)
        for b in (0, 3):
            lens = jnp.where(jnp.arange(5) == b, call.kv_lens, 0)
            cu = jnp.asarray(np.where(np.arange(6) > b, 1, 0), jnp.int32)
            first = int(call.cu_q_lens[b])
            alone = dataclasses.replace(call, q=jnp.roll(call.q, -first, axis=0), kv_lens=lens, cu_q_lens=cu)
            np.testing.assert_array_equal(np.asarray(run(*alone.args))[0], together[first])


def test_the_native_library_refuses_other_chunks():
    if reason := native_cpu.why_not():
        pytest.skip(reason)
    call = make_call([1], [9])
    with tuning.forced({"native_cpu.attention": {"chunk": 100}}), pytest.raises(Exception, match="got 100"):
        jax.block_until_ready(paged_attention(*call.args, backend="native_cpu"))


def test_the_cpu_it_runs_on_has_a_file_of_its_own():
    name = tuning.file_name(tuning.device_name(current_hardware()))
    assert name.endswith(".json")
    assert len(name) > len(".json")


@pytest.fixture(scope="module")
def tuner():
    """scripts/tune_kernels.py as a module, its flags at their defaults."""
    folder = pathlib.Path(__file__).resolve().parents[2] / "scripts"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        module = importlib.import_module("tune_kernels")
        flags.FLAGS(["tune_kernels"])
        yield module
        for name in ("tune_kernels", "kernel_calls", "machine"):
            sys.modules.pop(name, None)


def test_the_tuner_knows_every_kernel_and_field(tuner):
    assert tuner.SUBJECTS.keys() == tuning.KERNELS.keys()
    for kernel, subject in tuner.SUBJECTS.items():
        assert subject.values.keys() == tuning.KERNELS[kernel].knobs.keys()
        for name, values in subject.values.items():
            assert [tuning.KERNELS[kernel].knobs[name].wrong(value) for value in values] == [None] * len(values)


def test_the_tuner_finds_the_fastest_and_drops_what_is_wrong(tuner, monkeypatch):
    """Times that are made up: two fields that only together gain, one value that fails, one that is off."""
    model = tuner.Model(32, 8, 128, 16, "bfloat16", "int8")
    tried = []

    def measure(timer, config):
        tried.append(config)
        if config["warps"] == 1:
            raise RuntimeError("out of resource: shared memory\nRequired: many")
        if config["splits"] == 64:
            raise tuner.Dropped("is off by 0.5")
        slow = abs(config["block_n"] - 64) + abs(config["stages"] - 2) * (2 - (config["block_n"] == 64))
        return [1e-5 * (1 + slow)] * len(timer.names)

    monkeypatch.setattr(tuner.Timer, "measure", measure)
    monkeypatch.setattr(tuner.Timer, "again", lambda timer, config: None)
    verdict, entry = tuner.tune("triton.decode", model)
    assert entry["config"]["block_n"] == 64
    assert entry["config"]["stages"] == 2
    assert entry["shape"] == SHAPE
    dropped = entry["measured"]["dropped"]
    assert dropped.keys() == {"fails: out of resource: shared memory", "is off by 0.5"}
    assert f"{sum(dropped.values())} dropped" in verdict
    assert len(tried) == len({tuple(config.items()) for config in tried}) < 60, "each once"
    monkeypatch.setattr(tuner.Timer, "measure", lambda timer, config: [1e-5] * len(timer.names))
    assert tuner.tune("triton.decode", model)[1] is None, "no gain, no entry"


def test_the_tuner_sees_wrong_results_and_rows_that_depend_on_others(tuner, monkeypatch):
    """A backend that adds something to its output that depends on the number of rows."""
    offset = [0.0]
    right = tuner.kernel_calls.paged_attention

    def wrong(q, cache, layer, table, *args, backend, **options):
        out = right(q, cache, layer, table, *args, backend=backend, **options)
        return out if backend == "reference" else out + (table.shape[0] - 3) * offset[0]

    monkeypatch.setattr(tuner.kernel_calls, "paged_attention", wrong)
    model = tuner.Model(2, 1, 8, 16, "float32", "float32")
    timer = tuner.Timer("xla.decode", model, tuner.tqdm(disable=True))
    monkeypatch.setattr(timer, "time", lambda q_lens, kv_lens: 1.0)
    for offset[0], verdict in ((1.0, "is off by 1"), (1e-6, "makes a row depend on the others"), (0.0, 1.0)):
        config = {"rows": 8, "block_tokens": 64}
        timer.found.clear()
        timer.seconds(config)
        found = timer.found[tuple(config.items())]
        assert found == verdict if isinstance(found, str) else set(found) == {verdict}


def test_the_tuners_file_keeps_other_entries(tuner, tmp_path):
    path = tmp_path / "some.json"
    other = {"kernel": "triton.prefill", "shape": SHAPE, "config": TILINGS["triton.prefill"][1]}
    path.write_text(json.dumps({**report(), "tuned": [*report()["tuned"], other]}))
    new = {**report()["tuned"][0], "config": {**DECODE, "warps": 8}}
    key = ("triton.decode", tuning.ShapeClass(**SHAPE))
    text = tuner.merged(path, GPU.kind, {key}, [new])
    assert {k: v["warps"] for (k, _), v in tuning.parse(text, GPU.kind).items()} == {
        "triton.decode": 8,
        "triton.prefill": 2,
    }
    assert [e["kernel"] for e in json.loads(tuner.merged(path, GPU.kind, {key}, []))["tuned"]] == ["triton.prefill"]
    path.write_text("{")
    with pytest.raises(SystemExit, match="is wrong, move it away first"):
        tuner.merged(path, GPU.kind, set(), [])


def test_the_benchmark_draws_its_report(tmp_path):
    root = pathlib.Path(__file__).resolve().parents[2]
    command = [sys.executable, "scripts/bench_kernels.py", "--results=benchmarks/kernels_cpu.json"]
    plot = tmp_path / "new" / "kernels.png"
    subprocess.run([*command, f"--plot={plot}"], cwd=root, check=True, timeout=600)
    assert plot.read_bytes().startswith(b"\x89PNG")
    wrong = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600, check=False)
    assert wrong.returncode
    assert "--plot" in wrong.stdout + wrong.stderr
