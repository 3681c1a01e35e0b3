"""README and CONTRIBUTING say what is true: their examples run, and what they name exists."""

import functools
import importlib.util
import os
import pathlib
import re
import shlex
import subprocess

import jax
import numpy as np
import openai
import pytest
from pagedjax_kernels.paged_attention.api import BACKENDS
from starlette.testclient import TestClient

from pagedjax import bench, capacity, flags
from pagedjax.config import Config
from pagedjax.convert import ConvertOptions
from pagedjax.engine.llm import LLM
from pagedjax.generate import GenerateOptions
from pagedjax.models import Llama
from pagedjax.models.spec import ARCHITECTURES
from pagedjax.options import options
from pagedjax.runner import Trap
from pagedjax.server.app import create_app
from pagedjax.server.protocol import ChatCompletionRequest, CompletionRequest
from pagedjax.simulate.__main__ import OutputOptions
from pagedjax.simulate.command import SIMULATION
from pagedjax.weights import LoadedModel
from tests.models.harness import tiny_spec
from tests.server.fakes import TOKENIZER, FakeAsyncEngine, fixed

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = {name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md")}
EVERYWHERE = pytest.mark.parametrize("name", DOCUMENTS)
DEFAULTS = {f"config.{path}": entry.value for path, entry in options(Config())}
FOLDERS = ("scripts", "configs", "kernels", "tests", "pagedjax", "notebooks", "benchmarks", ".ci")


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def block_with(words):
    (found,) = [block for block in blocks(README, "python") if words in block]
    return found


def section(title):
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.DOTALL | re.MULTILINE)[1]


def inline_code(text):
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def command_lines(text):
    """The words of every command in the bash blocks."""
    for block in blocks(text, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words


def option_flags(tables):
    return {name for table in tables for name, _ in options(table())}


def own_flags(module, command=""):
    if module == "pagedjax.bench":
        tables = bench.COMMANDS[command].tables
    else:
        tables = {
            "pagedjax.serve": [],
            "pagedjax.snapshot": [],
            "pagedjax.generate": [GenerateOptions],
            "pagedjax.convert": [ConvertOptions],
            "pagedjax.simulate": [OutputOptions],
            "pagedjax.capacity": [capacity.CapacityOptions],
        }[module]
    return option_flags(tables) | {"help", "print_config"}


# Examples


@pytest.mark.smoke
def test_the_flax_example_is_attention(capsys):
    names = {}
    exec(compile(block_with("class Block"), "README.md", "exec"), names)
    assert capsys.readouterr().out == "[1 2 3 0 0 0 0 0]\n"
    assert bool(names["ok"].all())
    x, block = names["xs"][:, 0], names["block"]
    qkv = block.qkv(x)
    expected = x + block.out(jax.nn.dot_product_attention(qkv[:, 0], qkv[:, 1], qkv[:, 2], is_causal=True))
    np.testing.assert_allclose(np.concatenate(names["outputs"]), expected, atol=2e-5)


def test_the_client_example_streams(capsys, monkeypatch):
    engine = FakeAsyncEngine(script=fixed("Paris."))
    engine.model_name = "SmolLM2-135M-Instruct"
    inside = TestClient(create_app(engine), base_url="http://127.0.0.1:8000")
    monkeypatch.setattr(openai, "OpenAI", functools.partial(openai.OpenAI, http_client=inside))
    exec(compile(block_with("from openai import"), "README.md", "exec"), {})
    assert capsys.readouterr().out == "Paris."


def test_the_offline_example(capsys, monkeypatch):
    """On a tiny random model over bytes: what the default model answers is tested elsewhere."""
    spec = tiny_spec(num_layers=1, vocab_size=len(TOKENIZER), max_position_embeddings=128)
    loaded = LoadedModel(Llama.random(spec), spec, TOKENIZER, "tiny", (TOKENIZER.eos_token_id,))
    monkeypatch.setattr("pagedjax.engine.build.load_model", lambda path, dtype: loaded)
    small = {"scheduler__max_num_seqs": 8, "scheduler__max_num_batched_tokens": 64, "cache__num_pages": 33}
    small |= {"runner__warm_up": False, "runner__compilation_cache": "", "progress": False}
    monkeypatch.setattr("pagedjax.engine.LLM", functools.partial(LLM, **small))
    names = {}
    exec(compile(block_with("from pagedjax import LLM"), "README.md", "exec"), names)
    assert names["llm"].engine.runner.page_size == 32
    assert len(names["answer"].outputs[0].token_ids) == 32
    assert capsys.readouterr().out


@EVERYWHERE
def test_python_blocks_compile(name):
    for block in blocks(DOCUMENTS[name], "python"):
        compile(block, name, "exec")


@EVERYWHERE
def test_commands_take_these_arguments(name):
    for words in command_lines(DOCUMENTS[name]):
        program, *arguments = words
        if program.startswith(("scripts/", ".ci/")):
            assert (ROOT / program).stat().st_mode & 0o100, f"{program} is not executable"
        if words[1:2] != ["-m"] or not words[2].startswith("pagedjax"):
            continue
        command = arguments.pop(2) if words[2] == "pagedjax.bench" else ""
        schema = SIMULATION if words[2] == "pagedjax.simulate" else flags.ENGINE
        file, _, rest = flags.split_arguments(arguments[2:], schema)  # checks names and values of the configuration
        assert file is None or (ROOT / file).is_file()
        given = {word.lstrip("-").split("=")[0] for word in rest}
        assert given <= own_flags(words[2], command), words


# Names


@EVERYWHERE
def test_files_exist(name):
    words = [word for code in inline_code(DOCUMENTS[name]) for word in code.split()]
    words += [word for line in command_lines(DOCUMENTS[name]) for word in line]
    paths = {word for word in words if word.split("/")[0] in FOLDERS and "/" in word and "=" not in word}
    links = set(re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", DOCUMENTS[name]))
    missing = [path for path in paths | links if not list(ROOT.glob(path))]
    assert paths
    assert not missing


@EVERYWHERE
def test_options_and_modules_exist(name):
    text = DOCUMENTS[name]
    for option in (code for code in inline_code(text) if re.fullmatch(r"config\.[a-z]+(\.\w+)?", code)):
        assert option in DEFAULTS or option == "config.json", option
    for module in re.findall(r"`(pagedjax(?:_kernels)?(?:\.[a-z_]+)+)`", text):
        parent, _, last = module.rpartition(".")
        found = (
            importlib.util.find_spec(module) if importlib.util.find_spec(parent).submodule_search_locations else None
        )
        assert found or hasattr(importlib.import_module(parent), last), module


def test_flags_exist():
    known = own_flags("pagedjax.generate") | own_flags("pagedjax.convert") | own_flags("pagedjax.capacity") | {"config"}
    known |= {name for command in bench.COMMANDS.values() for name in option_flags(command.tables)}
    for flag in re.findall(r"`--(?:no)?([a-z_]+)[^`]*`", README):
        assert flag in known, flag


def test_the_table_of_options_has_the_defaults():
    rows = re.findall(r"^\| (`config[^|]*) \| ([^|]*) \|", section("Configuration"), re.MULTILINE)
    assert len(rows) > 10
    for names, values in rows:
        for option, value in zip(inline_code(names), values.split(", "), strict=True):
            default = DEFAULTS[option]
            assert value.strip("`") == (
                str(default).lower()
                if isinstance(default, bool)
                else f"{default:g}"
                if isinstance(default, float)
                else str(default)
            ), option


def test_endpoints_fields_and_metrics():
    text = section("Server")
    app = create_app(FakeAsyncEngine())
    routes = {route.path for route in app.routes} - {"/openapi.json", "/v1/models/{name:path}"}
    assert {path for _, path in re.findall(r"`(GET|POST) (/[\w/]+)`", text)} == routes
    (paragraph,) = [p for p in text.split("\n\n") if p.startswith("Beyond OpenAI")]
    fields = {name for name in inline_code(paragraph) if re.fullmatch(r"[a-z_]+", name)}
    assert len(fields) > 10
    assert fields <= set(CompletionRequest.model_fields) | set(ChatCompletionRequest.model_fields)
    shown = TestClient(app).get("/metrics").text
    for metric in re.findall(r"`(pagedjax:\w+)`", text):
        assert metric in shown, metric


def test_names_in_the_text():
    assert set(re.findall(r"`(\w+ForCausalLM)`", README)) == set(ARCHITECTURES)
    assert set(Trap.__members__) == set(re.findall(r"\(([A-Z]+)\)", section("How it works")))
    limits = section("Limits")
    assert all(f"`{backend.name}`" in limits for backend in BACKENDS), "an attention backend that README does not know"


@pytest.mark.parametrize("path", sorted((ROOT / "scripts").iterdir()), ids=lambda path: path.name)
def test_scripts_say_what_they_are_for(path):
    if path.suffix in ("", ".py"):
        first, second = path.read_text().splitlines()[:2]
        assert second.startswith(("# ", '"""')) or first.startswith('"""'), f"{path.name}: begins without a description"


@pytest.mark.parametrize("script", ["install", "check", "make_goldens", "bench_device"])
def test_help_of_scripts_does_nothing_else(script, tmp_path):
    """Not even make an environment, which they otherwise begin with."""
    environment = {**os.environ, "VENV": str(tmp_path / "venv"), "PAGEDJAX_CACHE": str(tmp_path / "cache")}
    command = [ROOT / "scripts" / script, "--help"]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert f"scripts/{script}" in done.stdout or "Usage" in done.stdout
    assert not list(tmp_path.iterdir())
