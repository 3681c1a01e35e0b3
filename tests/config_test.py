"""Configuration: the command line, files, ranges, and errors that name the option and the nearest one."""

import pathlib
import subprocess
import sys

import pytest
from absl import flags as absl_flags

from pagedjax import flags, help_text
from pagedjax.config import CacheConfig, Config, ServerConfig
from pagedjax.errors import ConfigError
from pagedjax.options import options

CONFIGS = sorted((pathlib.Path(__file__).parents[1] / "configs").glob("*.py"))


def parse(*arguments: str) -> Config:
    return flags.parse(["tool", *arguments], absl_flags.FlagValues())[0]


@pytest.mark.smoke
def test_no_arguments_give_the_defaults():
    assert parse() == Config() == flags.load()


@pytest.mark.smoke
@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_profile_loads(path):
    assert isinstance(parse(f"--config={path}"), Config)


def test_overrides_win_over_the_file_in_any_order():
    path = CONFIGS[-1]
    for arguments in (
        [f"--config={path}", "--config.cache.page_size=32"],
        ["--config.cache.page_size", "32", "--config", str(path)],
    ):
        config = parse(*arguments)
        assert config.cache.page_size == 32
        assert config.cache.num_pages == flags.load(str(path)).cache.num_pages


@pytest.mark.parametrize(
    ("argument", "path", "value"),
    [
        ("--config.cache.page_size=32", "cache.page_size", 32),
        ("-config.cache.page_size=32", "cache.page_size", 32),
        ("--config.cache.prefix_caching=false", "cache.prefix_caching", False),
        ("--noconfig.cache.prefix_caching", "cache.prefix_caching", False),
        ("--config.server.allow_open", "server.allow_open", True),
        ("--config.cache.memory_fraction=0.5", "cache.memory_fraction", 0.5),
        ("--config.runner.slice_ms=50", "runner.slice_ms", 50.0),
        ("--config.runner.lane_buckets=8,32", "runner.lane_buckets", (8, 32)),
        ("--config.runner.lane_buckets=(8,)", "runner.lane_buckets", (8,)),
        ("--config.runner.lane_buckets=", "runner.lane_buckets", ()),
        ("--config.server.api_keys=12345,0017,1e5", "server.api_keys", ("12345", "0017", "1e5")),
        ("--config.model.path=a=b", "model.path", "a=b"),
        ("--config.seed=9223372036854775807", "seed", 2**63 - 1),
    ],
)
def test_values_take_the_type_of_their_field(argument, path, value):
    found = dict(options(parse(argument)))[path].value
    assert found == value
    assert type(found) is type(value)


def test_a_list_given_several_times_is_joined():
    assert parse("--config.server.api_keys=a", "--config.server.api_keys=b").server.api_keys == ("a", "b")


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--config.cache.pagesize=32", ["config.cache.pagesize", "did you mean config.cache.page_size"]),
        ("--config.page_size=32", ["config.page_size", "did you mean config.cache.page_size"]),
        ("--config.cash.num_pages=2", ["did you mean config.cache.num_pages"]),
        ("--config.zzz.qqq=2", ["sections are", "scheduler"]),
        ("--config.cache=3", ["a section", "--config.cache.page_size"]),
        ("--config.cache.page_size=0", ["config.cache.page_size", "[1, 256]", "0", "tokens in a page"]),
        ("--config.cache.page_size=257", ["[1, 256]", "257"]),
        ("--config.cache.page_size=1.5", ["whole number", "'1.5'"]),
        ("--config.cache.page_size=abc", ["whole number in [1, 256]", "'abc'"]),
        ("--config.cache.page_size", ["needs a value"]),
        ("--config.cache.memory_fraction=nan", ["[0.05, 0.98]"]),
        ("--config.cache.memory_fraction=inf", ["[0.05, 0.98]"]),
        ("--config.cache.prefix_caching=maybe", ["true or false", "maybe"]),
        ("--noconfig.cache.page_size", ["'no' is for true or false"]),
        ("--config.model.dtype=float8", ["one of auto, float32, bfloat16, float16", "float8"]),
        ("--config.runner.lane_buckets=8,x", ["a list, each a whole number"]),
        ("--config.server.port=65536", ["[0, 65535]"]),
        ("--confg=x.py", ["confg", "config"]),
        ("--config=configs/absent.py", ["no such file"]),
    ],
)
def test_errors_name_the_option_the_range_and_the_nearest_name(argument, words):
    with pytest.raises(ConfigError) as error:
        parse(argument)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("config.cache.pagesize = 3", ["page_size"]),
        ("config.cache.page_size = 'x'", ["page_size"]),
        ("config.cache.page_size = 0", ["config.cache.page_size", "[1, 256]"]),
        ("raise RuntimeError('no luck')", ["RuntimeError", "no luck"]),
        ("return None", ["get_config", "NoneType"]),
        ("return {'cache': {'pagesize': 3}}", ["did you mean config.cache.page_size"]),
        ("return {'cache': 3}", ["config.cache", "a section"]),
        ("syntax error", ["config.py"]),
    ],
)
def test_errors_in_a_file(tmp_path, body, words):
    file = tmp_path / "config.py"
    file.write_text(
        "from pagedjax.flags import default_config_dict\n"
        f"def get_config():\n    config = default_config_dict()\n    {body}\n    return config\n"
    )
    with pytest.raises(ConfigError) as error:
        parse(f"--config={file}")
    for word in words:
        assert word in str(error.value)
    assert "Traceback" not in str(error.value)


def test_a_missing_file_names_its_neighbour():
    with pytest.raises(ConfigError, match=r"did you mean .*default\.py"):
        parse(f"--config={CONFIGS[0].parent / 'defualt.py'}")


def test_a_file_may_take_an_argument(tmp_path):
    file = tmp_path / "sized.py"
    file.write_text("def get_config(size):\n    return {'cache': {'page_size': int(size)}}\n")
    assert parse(f"--config={file}:64").cache.page_size == 64


def test_the_description_is_a_file_that_gives_the_same_configuration(tmp_path):
    config = parse("--config.cache.page_size=64", "--config.runner.lane_buckets=4,8", "--config.model.served_name=it's")
    text = help_text.describe(config)
    file = tmp_path / "described.py"
    file.write_text(text)
    assert parse(f"--config={file}") == config
    assert "(default: 16)" in text
    assert "tokens in a page; a whole number in [1, 256]" in text


def test_the_description_never_prints_keys():
    assert "hunter2" not in help_text.describe(Config(server=ServerConfig(api_keys=("hunter2",))))


def test_help_explains_every_option():
    text = help_text.help_text("usage")
    for path, entry in options(Config()):
        assert f"--config.{path}\n" in text
        assert entry.field.metadata["help"].split()[0] in text


def test_types_are_checked_when_built_in_python():
    for bad in (0, 257, 1.5, True, "16", None):
        with pytest.raises(ConfigError, match=r"config\.cache\.page_size"):
            Config(cache=CacheConfig(page_size=bad))
    with pytest.raises(ConfigError, match=r"config\.cache"):
        Config(cache={"page_size": 3})


def test_overrides_in_python_reject_unknown_paths():
    with pytest.raises(ConfigError, match="did you mean"):
        flags.load(overrides={"cache.page_sise": 3})


TOOL = """
from pagedjax import command_line
from pagedjax.errors import ModelLoadError
def main(config):
    if config.seed == 1:
        raise ModelLoadError("no model here")
    print(config.cache.page_size)
command_line.run(main, "usage: tool")
"""


@pytest.mark.parametrize(
    ("arguments", "status", "out", "err"),
    [
        (["--config.cache.page_size=8"], 0, "8\n", ""),
        (["--help"], 0, "--config.cache.page_size", ""),
        (["--print_config"], 0, "def get_config():", ""),
        (["--config.cache.page_size=x"], 1, "", "error: config.cache.page_size: must be"),
        (["--config.seed=1"], 1, "", "error: no model here\n"),
        (["stray"], 1, "", "error: unexpected argument 'stray'"),
    ],
)
def test_a_tool_from_the_outside(arguments, status, out, err):
    done = subprocess.run(
        [sys.executable, "-c", TOOL, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status, done.stderr
    assert out in done.stdout
    assert done.stderr.startswith(err)
    assert "Traceback" not in done.stderr
