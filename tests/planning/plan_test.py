"""`python -m pagedjax.capacity`: exact values of the paper, consistency with the engine, errors, what it prints."""

import json
import subprocess
import sys

import pytest

from pagedjax import capacity
from pagedjax.capacity import CapacityOptions
from pagedjax.config import Config
from pagedjax.errors import ConfigError, ModelLoadError
from pagedjax.models.shapes import REFERENCE_SHAPES, shape_of
from pagedjax.pages.schemes import RequestShape
from pagedjax.planning import CARDS, Question, make_plan, parse_memory
from pagedjax.runner import sizing
from tests.models.harness import tiny_spec

GIB = 2**30


def plan(**given):
    return make_plan(
        capacity.question_of(CapacityOptions(**{"weight_dtype": "float16", "kv_dtype": "float16", **given}))
    )


@pytest.mark.parametrize(
    ("model", "kv_memory", "tokens"), [("opt-13b", "12", 15_728), ("opt-66b", "21", 9_557), ("opt-175b", "264", 60_074)]
)
def test_table_1_of_the_paper(model, kv_memory, tokens):
    # A page of one token is a slot; one of them is reserved.
    found = plan(model=model, kv_memory=kv_memory, page_size=1)
    assert found.pages == found.contiguous_tokens == tokens


def test_table_1_over_the_papers_devices():
    """Four A100 share OPT-66B: a quarter of the heads and of the memory each, the same number of tokens."""
    assert plan(model="opt-66b", kv_memory="5.25", page_size=1, tensor_parallel=4).pages == 9_557
    assert plan(model="opt-175b", kv_memory="33", page_size=1, tensor_parallel=8).pages == 60_074


def test_sizes_of_the_paper():
    llama = plan(model="llama-7b", memory="A100-40GB")
    assert llama.bytes_per_token_per_layer == 16 * 1024
    assert llama.bytes_per_token == 512 * 1024
    assert llama.bytes_per_page == 32 * 256 * 1024
    opt = plan(model="OPT-13B", kv_memory="12", lengths=("161/338",))
    assert opt.bytes_per_token == 800 * 1024
    assert opt.bytes_per_page == 13_107_200
    assert opt.pages == 983
    assert opt.weight_bytes == 2 * 12_853_473_280
    (line,) = opt.lines
    assert line.requests == {
        "contiguous_max": 7,
        "contiguous_pow2": 15,
        "contiguous_oracle": 30,
        "chunks": 30,
        "paged": 30,
        "paged_average": 46,
    }
    # 7 requests of 499 tokens in 15,728 slots (and a remainder of 12 GiB that is no slot).
    assert line.utilisation["contiguous_max"] == pytest.approx(7 * 499 * 819_200 / (12 * GIB))


def test_scales_of_quantised_pages_count():
    bf16, int8, fp8 = (
        plan(model="llama-3-8b", kv_dtype=d).bytes_per_token for d in ("bfloat16", "int8", "float8_e4m3fn")
    )
    assert bf16 == 2 * 32 * 8 * 128 * 2
    assert int8 == fp8 == 2 * 32 * 8 * (128 + 4)


def test_more_devices_than_kv_heads():
    eight, sixteen = (plan(model="llama-3-8b", tensor_parallel=n, memory="24") for n in (8, 16))
    assert eight.kv_heads_per_device == sixteen.kv_heads_per_device == 1
    assert eight.bytes_per_token == sixteen.bytes_per_token == 2 * 32 * 128 * 2
    three = plan(model="llama-3-8b", tensor_parallel=3, memory="24")
    assert three.kv_heads_per_device == 3


def test_shared_prefix():
    # The worked example: one system prompt of 2,000 tokens is held once.
    found = plan(model="opt-13b", kv_memory="12", lengths=("2000/48",), shared_prefix=2000)
    (line,) = found.lines
    assert line.requests["paged"] == 982 // 128
    assert line.requests["paged_prefix"] == (982 - 125) // 3
    assert 0.9 < line.utilisation["paged_prefix"] <= 1


def windowed():
    return shape_of(tiny_spec(num_layers=6, windows=(32, 32, 0) * 2, num_kv_heads=2, head_dim=80), "windowed")


def test_sliding_windows():
    question = Question(
        windowed(), 0, cache_bytes=2**20, page_size=8, max_len=256, lengths=(RequestShape(100, 60),), step_tokens=16
    )
    found = make_plan(question)
    assert found.stored_head_dim == 128  # 80 is padded
    assert found.layer_groups == 3
    page = 2 * 8 * 2 * 2 * 128 * 2  # layers of a group, tokens, K and V, heads, head dim, bytes
    assert found.bytes_per_page == page
    assert found.bytes_per_token == 6 * 2 * 2 * 128 * 2
    assert found.usable_pages == 2**20 // page - 1
    (line,) = found.lines
    # All of 160 tokens in one group; in two, the window and a step, wherever they begin in a page.
    assert line.pages == 20 + 2 * ((31 + 16 + 6) // 8 + 1)
    assert line.requests["paged"] == found.usable_pages // line.pages
    assert line.requests["contiguous_oracle"] == (2**20 // found.bytes_per_token // 16) // 16
    used = line.requests["paged"] * (2 * 160 + 4 * 32) * 2 * 2 * 128 * 2
    assert line.utilisation["paged"] == pytest.approx(used / 2**20)
    with pytest.raises(ConfigError, match="shared_prefix"):
        make_plan(Question(windowed(), 0, cache_bytes=2**20, max_len=256, lengths=question.lengths, shared_prefix=8))


@pytest.mark.parametrize("spec", [tiny_spec(num_layers=4), tiny_spec(num_layers=6, windows=(8, 8, 0) * 2)])
def test_the_engine_finds_as_many_pages(spec, monkeypatch):
    """The same memory, fraction and sizes: as many pages as the engine would lay out there."""
    monkeypatch.setattr(sizing, "device_memory", lambda: 2**28)
    monkeypatch.setattr(sizing, "_on_cpu", lambda: False)
    config = Config()
    shape = shape_of(spec, "tiny")
    engine = sizing.num_pages(config, spec, 2 * shape.num_parameters(), max_len=10**6)
    found = make_plan(Question(shape, 2**28, page_size=config.cache.page_size, fraction=config.cache.memory_fraction))
    assert found.pages == engine - 1, "the engine adds the page that nobody owns"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24", 24 * GIB),
        ("1.5GiB", 3 * GIB // 2),
        ("40GB", 40 * 10**9),
        ("h200", CARDS["H200"]),
        ("tpu-v5e", CARDS["TPU v5e"]),
        ("a100 80gb", 80 * GIB),
    ],
)
def test_memory(text, expected):
    assert parse_memory("--memory", text) == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"memory": "h100"}, "--memory: 'h100' .*did you mean 'H100-80GB'"),
        ({"memory": "0"}, "--memory: must be above 0"),
        ({"memory": "potato"}, "cards are T4"),
        ({"lengths": ("12",)}, "--lengths: must be prompt/output"),
        ({"lengths": ("0/5",)}, "--lengths: '0/5': prompt"),
        ({"lengths": ("2000/100",)}, "2000/100: max_len: 2048"),
        ({"memory": "24"}, "opt-13b: 0.00 GiB are left .*weights take 23.94"),
        ({"shared_prefix": 200, "kv_memory": "12", "lengths": ("161/338",)}, "--shared_prefix: 200 is longer"),
        ({"page_size": 0}, "page_size"),
    ],
)
def test_errors_name_the_flag(given, words):
    with pytest.raises((ConfigError, ValueError), match=words):
        plan(**{"model": "opt-13b", **given})


def test_models_from_files(tmp_path, monkeypatch):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "intermediate_size": 96,
        "vocab_size": 100,
        "max_position_embeddings": 512,
    }
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for path in (folder, folder / "config.json"):
        shape = capacity.find_shape(str(path))
        assert (shape.name, shape.num_layers, shape.max_len) == ("my-model", 3, 512)
    with pytest.raises(ModelLoadError, match="no such file or folder"):
        capacity.find_shape(str(tmp_path / "absent"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ModelLoadError, match=r"'some/model' is neither a local path .*(?s:.)*Check the name and the network"
    ):
        capacity.find_shape("some/model")


@pytest.mark.model
def test_the_default_model():
    shape = capacity.find_shape("default")
    assert shape.name == "SmolLM2-135M-Instruct"
    assert shape.num_parameters() == 134_515_008
    assert capacity.find_shape("gemma3-270m").groups.windows.count(512) == 5


def test_the_command(tmp_path):
    """As its user runs it: tables on the terminal, JSON and PNG in files."""
    command = [
        sys.executable,
        "-m",
        "pagedjax.capacity",
        "--model=opt-13b",
        "--kv-memory=12",
        "--lengths=161/338,19/58",
    ]
    command += [f"--json={tmp_path / 'plan.json'}", f"--plot={tmp_path / 'plan.png'}", "--lengths=1024/1024"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    for word in ("800 KiB", "12.50 MiB", "983", "15,712", "Concurrent requests"):
        assert word in done.stdout
    record = json.loads((tmp_path / "plan.json").read_text())
    assert [(line["prompt"], line["output"]) for line in record["lines"]] == [(161, 338), (19, 58), (1024, 1024)]
    assert record["lines"][0]["requests"]["contiguous_max"] == 7
    assert record["question"]["kv_memory"] == "12"
    assert (tmp_path / "plan.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_reference_shapes_are_named_in_the_help():
    assert all(name in capacity.__doc__ for name in REFERENCE_SHAPES)
