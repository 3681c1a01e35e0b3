"""The client against a server that misbehaves: what fails, what counts, and when."""

import asyncio
import json
import random
import re

import numpy as np
import pytest

from pagedjax.benchmarking.client import Client, Target
from pagedjax.benchmarking.load import run_load
from pagedjax.benchmarking.metrics import chunk_times, count_output
from pagedjax.benchmarking.prompts import Tokenizer
from pagedjax.benchmarking.serving import DatasetOptions, LoadOptions, SamplingOptions, ServerOptions, _Run
from pagedjax.benchmarking.sse import EventDecoder
from pagedjax.benchmarking.workload import BenchRequest
from pagedjax.errors import ConfigError
from tests.benchmarking.fake_server import FakeServer, serving
from tests.server.fakes import TOKENIZER


def talk(scripts, *, chat=False, server=None, times=None, timeout=60.0, fields=None, **options):
    """(outcomes, duration) of requests whose prompts are these scripts."""
    server = server or FakeServer()
    requests = [BenchRequest(json.dumps(script), 11, 5) for script in scripts]

    async def run():
        async with serving(server) as url:
            path = "/v1/chat/completions" if chat else "/v1/completions"
            async with Client(Target(url, path, chat, "fake", fields or {}), timeout) as client:
                return await run_load(client, requests, times or [0.0] * len(requests), progress=False, **options)

    return asyncio.run(run())


def one(script, **options):
    (outcome,), _ = talk([script], **options)
    return outcome


# Events


def test_events_however_the_stream_is_cut():
    whole = (
        b": hello\r\n\r\ndata: one\r\n\r\nevent: x\ndata: two\ndata: lines\n\ndata:three\r\n\r\n"
        b"id: 4\n\ndata: \xf0\x9f\x97\xbc\n\ndata: last"
    )
    expected = [b"one", b"two\nlines", b"three", "🗼".encode(), b"last"]
    rng = random.Random(0)
    for _ in range(200):
        decoder, found, at = EventDecoder(), [], 0
        while at < len(whole):
            step = rng.randrange(1, 9)
            found += decoder.feed(whole[at : at + step])
            at += step
        assert found + decoder.close() == expected
    decoder = EventDecoder()
    assert decoder.feed(whole) + decoder.close() == expected


# Answers


def test_a_whole_answer():
    found = one(["Hel", "lo", "!stop", "!usage 5", "!done"])
    assert found.ok
    assert (found.text, found.output_len, found.counted_by, found.finish_reason) == ("Hello", 5, "usage", "stop")
    assert found.prompt_len == 7, "as the server counts"
    assert (found.num_chunks, len(found.itls)) == (2, 1)


def test_chat_begins_with_a_chunk_that_is_no_token():
    found = one(["!role", 0.15, "a", "b", "!stop", "!usage 2", "!done"], chat=True)
    assert (found.text, found.num_chunks) == ("ab", 2)
    assert found.ttft >= 0.15


def test_times():
    """Waits of the server are lower bounds of what the client measures, whatever the machine does."""
    found = one([0.05, "a", 0.1, "b", 0.02, "c", 0.03, "!stop", "!done"])
    assert found.ttft >= 0.05
    assert found.itls[0] >= 0.1 - 0.002  # a timer may fire a clock tick early
    assert found.itls[1] >= 0.02 - 0.002
    assert found.latency >= found.ttft + sum(found.itls) + 0.03 - 0.002
    np.testing.assert_allclose(chunk_times(found)[-1], found.start + found.ttft + sum(found.itls))


def test_servers_without_usage():
    """Then token ids count, else the tokenizer, else chunks."""
    scripts = [["abc", "!ids 4", "de", "!stop", "!done"], ["abc", "de", "!stop", "!done"], ["abc", "!stop"]]
    outcomes, _ = talk(scripts)
    count_output(outcomes, Tokenizer(TOKENIZER))
    assert [(o.output_len, o.counted_by) for o in outcomes] == [(4, "token_ids"), (5, "tokenizer"), (3, "tokenizer")]
    outcomes, _ = talk(scripts[1:2])
    count_output(outcomes, None)
    assert (outcomes[0].output_len, outcomes[0].counted_by) == (2, "chunks")
    assert outcomes[0].prompt_len == 11, "as the client counted"


def test_several_tokens_in_a_chunk():
    found = one(["abcd", 0.05, "efgh", "!stop", "!usage 8", "!done"])
    assert len(found.itls) == 1
    assert found.tpot == (found.latency - found.ttft) / 7


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (["!status 429"], "HTTP 429: the queue is full"),
        (["!status 500"], "HTTP 500"),
        (["a", "!drop"], "ClientPayloadError|ServerDisconnected|ClientConnection|ClientOSError"),
        (["a", "!end"], r"without \[DONE\] and without a finish reason"),
        ([], r"without \[DONE\]"),
        (["a", "!error engine died", "!done"], "engine died"),
        (["a", "!raw data: {oops\n\n"], "not JSON"),
        (["a", "!raw data: 5\n\n"], "not an object"),
    ],
)
def test_failures(script, words):
    failed, good = talk([script, ["a", "!stop", "!done"]])[0]
    assert not failed.ok
    assert re.search(words, failed.error), failed.error
    assert good.ok, "one failure is no other's"


def test_what_is_no_stream(monkeypatch):
    async def whole(self, request):
        from aiohttp import web

        return web.json_response({"choices": [{"text": "all at once"}]})

    monkeypatch.setattr(FakeServer, "answer", whole)
    assert "application/json, not a stream" in one(["a"]).error


def test_nobody_listens():
    async def run():
        async with Client(Target("http://127.0.0.1:9", "/v1/completions", False, "m"), 60.0) as client:
            return await client.send(b"{}", 1, 0.0)

    assert "ClientConnectorError" in asyncio.run(run()).error


def test_too_slow():
    found = one(["a", 1.5, "b", "!done"], timeout=0.3)
    assert found.error.startswith("timed out after")
    assert found.latency >= 0.3


# Load


def test_open_loop():
    """Requests leave when they are due, although the first has not been answered."""
    times = [0.0, 0.02, 0.04, 0.06]
    outcomes, duration = talk([["!wait 4", "a", "!done"]] * 4, times=times)
    for outcome, due in zip(outcomes, times, strict=True):
        assert outcome.ok, "a client that waits for answers would wait for ever"
        assert outcome.scheduled == due
        assert outcome.start >= due
    assert outcomes[0].latency >= 0.06 - outcomes[0].start
    assert duration >= 0.06


def test_limit_of_concurrency():
    server = FakeServer()
    outcomes, _ = talk([[0.02, "a", "!done"]] * 9, server=server, max_concurrency=3)
    assert server.most_running == 3
    assert all(o.ok for o in outcomes)
    assert max(o.start for o in outcomes) >= 0.03, "the wait is before the start, not in the latency"


def test_what_is_sent():
    server = FakeServer()
    fields = SamplingOptions(temperature=0.5, top_k=7, ignore_eos=True, logprobs=2).fields(chat=False)
    talk([["a", "!done"]], server=server, fields=fields, request_id_prefix="run-")
    (body,) = server.bodies
    assert body == {
        "model": "fake",
        "prompt": '["a", "!done"]',
        "max_tokens": 5,
        "stream": True,
        "temperature": 0.5,
        "top_k": 7,
        "ignore_eos": True,
        "logprobs": 2,
    }
    assert server.headers[0]["X-Request-Id"] == "run-0"
    assert SamplingOptions(logprobs=2).fields(chat=True) == {"temperature": 0.0, "logprobs": True, "top_logprobs": 2}


# A whole run


def measure(server, tmp_path, load=None, **given):
    TOKENIZER.save_pretrained(tmp_path)

    async def run(url=None):
        async with serving(server) as url:
            options = ServerOptions(**{"base_url": f"{url}/v1", "tokenizer": str(tmp_path), **given})
            dataset = DatasetOptions(num_prompts=4, input_len=9, output_len=3)
            load_options = load or LoadOptions(progress=False)
            return await _Run(options, dataset, load_options, SamplingOptions()).measure()

    return asyncio.run(run())


def test_token_ids_where_the_server_takes_them(tmp_path):
    server = FakeServer()
    found = measure(server, tmp_path)
    assert (found.prompt_format, found.model) == ("ids", "fake")
    assert all(isinstance(b["prompt"], list) and len(b["prompt"]) == 9 for b in server.bodies[1:])
    server = FakeServer(token_ids=False)
    found = measure(server, tmp_path)
    assert found.prompt_format == "text"
    prompts = [b["prompt"] for b in server.bodies[2:]]
    assert [Tokenizer(TOKENIZER).count(p) for p in prompts] == [9] * 4
    with pytest.raises(ConfigError, match=r"first request .* failed: HTTP 400: prompt: must be a text"):
        measure(FakeServer(token_ids=False), tmp_path, prompt_format="ids")
    found = measure(FakeServer(), tmp_path, tokenizer="none", vocab_size=50)
    assert found.tokenizer is None
    with pytest.raises(ConfigError, match="--tokenizer: needed"):
        measure(FakeServer(), tmp_path, tokenizer="none")


def test_a_server_that_is_still_loading(tmp_path):
    server = FakeServer()
    server.refusals = 1
    assert measure(server, tmp_path).outcomes[0].ok
    server.refusals = 1
    with pytest.raises(ConfigError, match="failed: HTTP 503: loading"):
        measure(server, tmp_path, ready_check_timeout_sec=0, prompt_format="text")


def test_keys_and_warm_ups(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "from the environment")
    server = FakeServer()
    measure(server, tmp_path, LoadOptions(progress=False, num_warmups=3), header=("X-A=b=c,d",))
    assert len(server.bodies) == 1 + 3 + 4
    assert {h["Authorization"] for h in server.headers} == {"Bearer from the environment"}
    assert {h["X-A"] for h in server.headers} == {"b=c,d"}
    (tmp_path / "key").write_text("from a file\n")
    measure(server, tmp_path, api_key_file=str(tmp_path / "key"))
    assert server.headers[-1]["Authorization"] == "Bearer from a file"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"base_url": "127.0.0.1:8000"}, "--base_url: must begin with http"),
        ({"extra_body": "[]"}, "--extra_body: must be a JSON object"),
        ({"header": ("secret",)}, "--header: must be NAME=VALUE"),
        ({"api_key_file": "/absent"}, "--api_key_file"),
    ],
)
def test_bad_options(given, words):
    with pytest.raises(ConfigError, match=words):
        _Run(ServerOptions(**given), DatasetOptions(), LoadOptions(), SamplingOptions())


def test_ramps_need_their_rates():
    requests = [BenchRequest("a", 1, 1)] * 3
    assert (
        len(LoadOptions(ramp_up_strategy="linear", ramp_up_start_rps=1.0, ramp_up_end_rps=2.0).times(requests, 0)) == 3
    )
    with pytest.raises(ConfigError, match="--ramp_up_strategy: needs"):
        LoadOptions(ramp_up_strategy="linear").times(requests, 0)
    traced = [BenchRequest("a", 1, 1, arrival=t) for t in (0.0, 2.0)]
    assert LoadOptions(request_rate=9.0).times(traced, 0).tolist() == [0.0, 2.0]


# Ctrl-C


def test_what_is_finished_when_a_run_is_stopped_is_kept(capsys):
    whole, slow = ["a", "!stop", "!usage 1", "!done"], ["a", 8.0]

    async def run(scripts, keep_finished):
        """The last request is due in ten minutes; stopped when at most one answer is still under way."""
        requests = [BenchRequest(json.dumps(script), 11, 5) for script in (*scripts, whole)]
        server, times = FakeServer(), [*[0.0] * len(scripts), 600.0]
        async with serving(server) as url, Client(Target(url, "/v1/completions", False, "fake", {}), 60.0) as client:
            load = run_load(client, requests, times, progress=False, keep_finished=keep_finished)
            task = asyncio.create_task(load)
            while len(server.bodies) < len(scripts) or server.running > scripts.count(slow):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)  # the client reads the ends of those that are short
            task.cancel()
            return await task

    outcomes, _ = asyncio.run(run([whole, slow, whole], True))
    assert [(o.ok, o.text) for o in outcomes] == [(True, "a"), (True, "a")]
    assert "2 of 4 requests are finished" in capsys.readouterr().err
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run([whole], False))
