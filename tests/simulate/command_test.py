"""The command: options, combinations, what it writes."""

import json

import pytest
from absl import flags as absl_flags
from ml_collections import config_dict

from pagedjax import flags, help_text
from pagedjax.errors import ConfigError
from pagedjax.simulate import SimConfig, Workload, collapsing_beams, simulate
from pagedjax.simulate import __main__ as command
from pagedjax.simulate.command import SIMULATION, CommandConfig, default_command_config, make_runs
from tests.simulate.cases import SMALL


def freeze(config):
    return flags.freeze(config, SIMULATION)


def test_the_profiles_are_valid():
    import importlib

    for name, num in (("sharegpt", 32), ("waste", 4), ("sweep", 200)):
        config = importlib.import_module(f"configs.simulate.{name}").get_config()
        config.workload.num_requests = 2
        assert len(make_runs(freeze(config))) == num


def test_every_combination_is_a_run():
    config = default_command_config()
    config.workload.num_requests = 5
    config.sweep.rates, config.sweep.schemes, config.sweep.seeds = (1, 2.5), ("paged", "orca_max"), (0, 1, 2)
    runs = make_runs(freeze(config))
    assert len(runs) == 12
    label, system, workload = runs[-1]
    assert label == {"rate": 2.5, "scheme": "orca_max", "seed": 2}
    assert system.scheme == "orca_max"
    assert workload.num_requests == 5
    assert freeze(default_command_config()) == CommandConfig()


@pytest.mark.parametrize(
    ("argument", "field", "want"),
    [
        ("--config.sweep.rates=0.5,1", "rates", (0.5, 1)),
        ("--config.sweep.rates=2", "rates", (2,)),
        ("--config.sweep.schemes=paged,orca_max", "schemes", ("paged", "orca_max")),
        ("--config.sweep.schemes=('paged','orca_max')", "schemes", ("paged", "orca_max")),
    ],
)
def test_lists_on_the_command_line(argument, field, want):
    config, _ = flags.parse(["simulate", argument], absl_flags.FlagValues(), SIMULATION)
    assert getattr(config.sweep, field) == want


def test_options_that_depend_on_one_another_come_in_any_order():
    beams, samples = "--config.system.beams=((0, 1), (0, 0))", "--config.system.samples=2"
    for arguments in ([beams, samples], [samples, beams]):
        config, _ = flags.parse(["simulate", *arguments], absl_flags.FlagValues(), SIMULATION)
        assert config.system == SimConfig(samples=2, beams=((0, 1), (0, 0)))


def test_help_and_the_configuration_as_a_file(tmp_path):
    text = help_text.help_text("usage", tables=[command.OutputOptions], schema=SIMULATION)
    assert "--plots" in text
    assert "--config.system.page_size\n" in text
    assert "--config.cache.page_size" not in text
    config = freeze({"system": {"samples": 2, "beams": [[0, 1]]}, "sweep": {"rates": [1, 2]}})
    path = tmp_path / "config.py"
    path.write_text(help_text.describe(config, SIMULATION))
    assert flags.parse(["simulate", f"--config={path}"], absl_flags.FlagValues(), SIMULATION)[0] == config


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("system.page_size", 0, r"page_size: must be a whole number in \[1, 2048\]; got 0"),
        ("system.policy", "x", "policy: must be one of first_come, .*got 'x'"),
        ("system.scheme", "orca", "scheme: must be one of paged, .*got 'orca'"),
        ("workload.kind", "x", "workload.kind: must be one of independent, chat, trace; got 'x'"),
        ("workload.rate", 0.0, r"workload.rate: must be a number in \[1e-06, "),
    ],
)
def test_bad_values_are_named(path, value, message):
    config = default_command_config().copy_and_resolve_references()
    section, name = path.split(".")
    with config.unlocked():
        config[section][name] = value
        with pytest.raises(ConfigError, match=message):
            freeze(config)


def test_unknown_options_are_named():
    with pytest.raises(ConfigError, match=r"pagesize: no such option; did you mean config.system.page_size"):
        freeze(config_dict.ConfigDict({"system": {"pagesize": 3}}))
    with pytest.raises(ConfigError, match=r"config.sytem: no such option; did you mean config.system\\?"):
        freeze(config_dict.ConfigDict({"sytem": {}}))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"arrival": 0, "prompt": 1.5, "output": 2}',
            r"trace.jsonl:1: prompt: must be a whole number of tokens, got 1.5",
        ),
        ('{"arrival": 1e30, "prompt": 1, "output": 2}', r"trace.jsonl:1: arrival: must be in \[0, 1e\+09\] seconds"),
        ('{"arrival": NaN, "prompt": 1, "output": 2}', r"trace.jsonl:1: arrival: must be in"),
        ('{"arrival": 0, "prompt": Infinity, "output": 2}', r"trace.jsonl:1: prompt: must be a whole number"),
    ],
)
def test_traces_of_nonsense_are_refused(line, message, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=message):
        make_runs(freeze({"workload": {"kind": "trace", "trace": str(path)}}))


def test_a_trace_needs_its_file_and_its_kind():
    with pytest.raises(ConfigError, match="name the file"):
        make_runs(freeze({"workload": {"kind": "trace"}}))
    with pytest.raises(ConfigError, match=r"needs config.workload.kind=trace, got 'independent'"):
        freeze({"workload": {"trace": "x.jsonl"}})


def test_files_are_looked_at_before_anything_is_simulated(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "report", lambda *_: pytest.fail("it began"))
    for given, message in (
        ({"output": str(tmp_path)}, "is a folder"),
        ({"output": str(tmp_path / "no" / "out.json")}, "there is no folder"),
        ({"plots": __file__}, "is a file"),
        ({"series": True}, "goes into the file"),
    ):
        with pytest.raises((ConfigError, SystemExit)) as error:
            command.main(CommandConfig(), command.OutputOptions(**given))
        assert message in str(error.value) + capsys.readouterr().err
    with pytest.raises(ValueError, match="calibration: nosuch: No such file"):
        _ = SimConfig(calibration="nosuch").cost


def test_what_does_not_go_together_is_named():
    with pytest.raises(ConfigError, match=r"beams: needs scheme paged .*got 'chunks' and 2"):
        SimConfig(scheme="chunks", samples=2, beams=collapsing_beams(2))
    with pytest.raises(ConfigError, match=r"beams: each step names 2 \(samples\) parents in \[0, 2\); got \(0, 2\)"):
        SimConfig(samples=2, beams=((0, 2),))
    with pytest.raises(ConfigError, match=r"prefix_caching: needs scheme paged, got 'orca_max'"):
        SimConfig(scheme="orca_max", prefix_caching=True)


def test_requests_that_never_fit_are_refused():
    load = Workload(arrival=[0], prompt=[40], output=[20])
    with pytest.raises(ValueError, match="a request of 60 tokens is longer than max_model_len, 48"):
        simulate(SimConfig(**SMALL), load)
    with pytest.raises(ValueError, match="a request needs 15 pages, there are 12"):
        simulate(SimConfig(**{**SMALL, "max_model_len": 64, "num_pages": 12}), load)
    with pytest.raises(ValueError, match="2 chunks of 16 units each do not fit into 31 units"):
        simulate(SimConfig(**{**SMALL, "max_model_len": 64, "num_pages": 31}, scheme="orca_max", samples=2), load)


def test_the_command_writes_figures_and_pictures(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps(dict(arrival=0.01 * i, prompt=24 - i, output=16)) for i in range(24)))
    config = default_command_config()
    config.system.update(SMALL)
    config.workload.kind, config.workload.trace = "trace", str(trace)
    config.sweep.rates = (20.0,)
    given = command.OutputOptions(output=str(tmp_path / "out.json"), series=True, plots=str(tmp_path / "plots"))
    command.report(freeze(config), given)
    out = json.loads((tmp_path / "out.json").read_text())
    assert out["runs"][0]["run"] == {"rate": 20.0}
    assert out["runs"][0]["finished"] == 24
    assert len(out["runs"][0]["series"]["time"]) == len(out["runs"][0]["series"]["running"])
    assert out["config"]["system"]["page_size"] == 4
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == ["over_time.png", "waste.png"]
    printed = capsys.readouterr()
    assert printed.out.split()[:2] == ["rate", "finished"]
    assert "1 runs" in printed.err
