"""`python -m pagedjax.bench` around the real engine (a tiny random model): served, and in this process."""

import asyncio
import json

import jax.numpy as jnp
import pytest

from pagedjax import bench
from pagedjax.benchmarking import offline, serving
from pagedjax.benchmarking.offline import BatchOptions, OfflineOptions
from pagedjax.benchmarking.serving import LoadOptions, ReportOptions, SamplingOptions, ServerOptions
from pagedjax.benchmarking.timeline import plot_timeline
from pagedjax.benchmarking.workload import DatasetOptions
from pagedjax.config import Config
from pagedjax.engine import LLM, AsyncEngine
from pagedjax.errors import ConfigError
from pagedjax.models import Llama
from pagedjax.weights import LoadedModel
from tests.benchmarking.metrics_test import by_hand
from tests.engine import tiny
from tests.models.harness import random_checkpoint, tiny_spec
from tests.server.fakes import TOKENIZER
from tests.server.lifecycle_test import running

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def llm():
    """Bytes as tokens, few pages, an engine that checks its invariants."""
    spec = tiny_spec(num_layers=2, vocab_size=len(TOKENIZER), max_position_embeddings=256)
    model = Llama.load(spec, random_checkpoint(spec, seed=3), jnp.float32)
    loaded = LoadedModel(model, spec, TOKENIZER, "tiny", (TOKENIZER.eos_token_id,))
    return LLM(engine=tiny.make_engine(model=loaded), progress=False)


def test_throughput(llm, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(offline, "_engine", lambda config, given: llm)
    path = tmp_path / "figures.json"
    dataset = DatasetOptions(num_prompts=5, input_len=20, output_len=7, prefix_len=16)
    assert offline.throughput(Config(), dataset, OfflineOptions(output_json=str(path), n=2, progress=False)) == 0
    record = json.loads(path.read_text())
    assert record["num_requests"] == 5
    assert record["total_prompt_tokens"] == 5 * 36
    assert record["total_output_tokens"] == 5 * 2 * 7
    assert record["total_num_tokens"] == 5 * 36 + 5 * 2 * 7
    assert record["requests_per_second"] == pytest.approx(5 / record["elapsed_time"])
    assert record["tokens_per_second"] == pytest.approx(250 / record["elapsed_time"])
    assert "Throughput: " in capsys.readouterr().out


def test_latency(llm, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(offline, "_engine", lambda config, given: llm)
    before = llm.engine.stats()
    path = tmp_path / "figures.json"
    batch = BatchOptions(input_len=24, output_len=3, batch_size=2, num_iters=4, num_iters_warmup=1)
    assert offline.latency(Config(), batch, OfflineOptions(output_json=str(path), progress=False)) == 0
    record = json.loads(path.read_text())
    assert len(record["latencies"]) == 4
    assert record["avg_latency"] == pytest.approx(sum(record["latencies"]) / 4)
    assert set(record["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    after = llm.engine.stats()
    assert after.generation_tokens - before.generation_tokens == 5 * 2 * 3
    assert after.prefix_hits == before.prefix_hits, "no run found another's prompts in the cache"
    assert "Avg latency: " in capsys.readouterr().out


@pytest.fixture(scope="module")
def url(llm):
    served = AsyncEngine(llm.engine)
    asyncio.run(served.start())
    with running(served) as address:
        yield address


def serve(url, tmp_path, load=None, shown=None, **given):
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    dataset = {key: given.pop(key) for key in list(given) if key in DatasetOptions.__dataclass_fields__}
    server = ServerOptions(**{"base_url": url, "tokenizer": str(tmp_path / "tokenizer"), **given})
    report = {"save_detailed": True, "result_dir": str(tmp_path), "result_filename": "result.json", **(shown or {})}
    status = serving.serve(
        server,
        DatasetOptions(**{"num_prompts": 6, "output_len": 5, **dataset}),
        LoadOptions(**{"progress": False, **(load or {})}),
        SamplingOptions(ignore_eos=True),
        ReportOptions(**report),
    )
    return status, tmp_path / "result.json"


@pytest.mark.parametrize("prompt_format", ["ids", "text"])
def test_completions(url, tmp_path, capsys, prompt_format):
    plot = tmp_path / "timeline.png"
    status, path = serve(
        url,
        tmp_path,
        {"request_rate": 100.0, "num_warmups": 2},
        {
            "plot_timeline": str(plot),
            "goodput": ("e2el:1e6",),
            "metadata": ("place=here",),
            "metric_percentiles": (50.0, 99.0),
        },
        prompt_format=prompt_format,
        input_len=30,
        range_ratio=0.5,
    )
    assert status == 0
    record = json.loads(path.read_text())
    assert (record["completed"], record["failed"]) == (6, 0)
    assert record["model_id"] == "tiny"
    assert record["place"] == "here"
    assert 2 <= min(record["output_lens"]) < max(record["output_lens"]) <= 8
    assert record["total_output_tokens"] == sum(record["output_lens"])
    assert record["total_input_tokens"] == sum(record["input_lens"])
    assert 15 <= min(record["input_lens"]) < max(record["input_lens"]) <= 45
    assert record["output_counted_by"] == {"usage": 6}
    assert record["request_goodput"] == pytest.approx(record["request_throughput"])
    assert record["arrival_times"][-1] == pytest.approx(6 / 100)
    for ttft, itls, latency in zip(record["ttfts"], record["itls"], record["latencies"], strict=True):
        assert 0 < ttft <= ttft + sum(itls) <= latency + 1e-9
    assert plot.read_bytes()[:8] == PNG
    assert "Mean normalized latency (s/token):" in capsys.readouterr().out


def test_the_servers_count_agrees_with_the_exact_lengths(url, tmp_path):
    """Prompts of 33 tokens as the client makes them are 33 tokens to the server, as ids and as text."""
    for prompt_format in ("ids", "text"):
        _, path = serve(url, tmp_path, prompt_format=prompt_format, input_len=33)
        record = json.loads(path.read_text())
        assert (record["input_lens"], record["output_lens"]) == ([33] * 6, [5] * 6)


def test_chat_and_appending(url, tmp_path):
    shown = {"append_result": True}
    for _ in range(2):
        status, path = serve(url, tmp_path, {"max_concurrency": 2}, shown, backend="openai-chat", input_len=12)
        assert status == 0
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["completed"] for r in records] == [6, 6]
    assert records[0]["max_concurrent_requests"] <= 2
    # The template adds its own tokens, all prompts the same number of them.
    assert len(set(records[0]["input_lens"])) == 1
    assert records[0]["input_lens"][0] > 12


def test_shared_prefixes_are_found_in_the_servers_cache(url, tmp_path):
    given = {"dataset_name": "prefix_repetition", "prefix_len": 32, "input_len": 5, "num_prefixes": 2, "seed": 9}
    _, path = serve(url, tmp_path, {"max_concurrency": 1}, **given)
    assert json.loads(path.read_text())["cached_input_tokens"] >= 4 * 32


def test_when_nothing_succeeds(url, tmp_path, capsys):
    status, path = serve(url, tmp_path, input_len=400)  # longer than the model's context
    assert status == 1
    record = json.loads(path.read_text())
    assert (record["completed"], record["failed"]) == (0, 6)
    assert "6 failed: HTTP 400: " in capsys.readouterr().out


def test_timelines(tmp_path):
    path = tmp_path / "timeline.png"
    plot_timeline(by_hand(), (25.0, 250.0), str(path))
    assert path.read_bytes()[:8] == PNG
    with pytest.raises(ConfigError, match="--plot_timeline"):
        plot_timeline(by_hand(), (25.0, 50.0), str(tmp_path / "absent" / "timeline.png"))


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--help"], 0, "python -m pagedjax.bench latency"),
        (["serve", "--help"], 0, "--request_rate"),
        (["throughput", "--help"], 0, "--config.cache.page_size"),
        ([], 1, "the first argument must be serve, throughput, latency, got 'none'"),
        (["sreve"], 1, "did you mean serve?"),
        (["serve", "--num-prompts=0"], 1, "--num_prompts: must be a whole number in [1, 10000000]; got 0"),
        (
            ["serve", "--goodput=ttft:1,itl:5"],
            1,
            "--goodput: must be ttft, tpot, e2el, each with :MILLISECONDS; got 'itl:5'",
        ),
        (["serve", "--config.cache.page_size=8"], 1, "--config: this command builds no engine"),
        (["serve", "stray"], 1, "unexpected argument 'stray'"),
        (["serve", "--metadata=x"], 1, "--metadata: must be key=value"),
        (
            ["serve", "--port=9", "--ready_check_timeout_sec=0"],
            1,
            "error: --base_url: no answer from http://127.0.0.1:9 for 0 s",
        ),
        (["serve", "--timeline_itl_thresholds=5"], 1, "--timeline_itl_thresholds: must be two numbers"),
    ],
)
def test_the_command_line(arguments, status, words, capsys):
    """In this process: absl keeps its flags in a table of the process, which is put back."""
    from absl import flags as absl_flags

    before = set(absl_flags.FLAGS)
    try:
        with pytest.raises(SystemExit) as ended:
            bench.main(["bench", *arguments])
    finally:
        for name in set(absl_flags.FLAGS) - before:
            delattr(absl_flags.FLAGS, name)
        absl_flags.FLAGS.unparse_flags()
    printed = capsys.readouterr()
    assert ended.value.code == status
    assert words in printed.out + printed.err
