"""Over real sockets: ordinary clients, clients that vanish or stall, signals, and the engine's death."""

import asyncio
import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import openai
import pytest

from pagedjax.config import ServerConfig
from pagedjax.errors import ConfigError
from pagedjax.server import run
from pagedjax.server.app import create_app
from pagedjax.types import CompletionOutput, RequestOutput
from tests.server.fakes import FakeAsyncEngine, config
from tests.server.harness import samples


@contextlib.contextmanager
def running(engine, keys=()):
    """Serves from a thread; yields the address."""
    settings = engine.config.server
    bound = run.bind(ServerConfig(port=0))
    ready = threading.Event()
    server = run.DrainingServer(create_app(engine, keys), settings, ready.set)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([bound])))
    thread.start()
    try:
        assert ready.wait(10)
        yield run.url_of(bound)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def wait_until(condition, seconds=2.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_openai_client():
    engine = FakeAsyncEngine(script=lambda r, i: "Paris 🗼")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    with running(engine, ("k",)) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
        assert [m.id for m in client.models.list()] == ["fake"]
        whole = client.chat.completions.create(model="fake", messages=messages, logprobs=True, top_logprobs=1)
        assert whole.choices[0].message.content == "Paris 🗼"
        assert whole.usage.prompt_tokens_details.cached_tokens == 0
        assert bytes(whole.choices[0].logprobs.content[0].bytes) == b"P"
        options = {"include_usage": True}
        chunks = list(
            client.chat.completions.create(model="fake", messages=messages, stream=True, stream_options=options)
        )
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Paris 🗼"
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert client.completions.create(model="fake", prompt="a").choices[0].text == "Paris 🗼"
        parts = client.completions.create(model="fake", prompt="a", stream=True)
        assert "".join(p.choices[0].text for p in parts) == "Paris 🗼"
        extra = {"return_token_ids": True, "top_k": 5}
        assert client.completions.create(model="fake", prompt="a", extra_body=extra).choices[0].token_ids
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="a")
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="fake", prompt="a", temperature=9)
        assert refused.value.param == "temperature"
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
        engine.fail_after = 1
        with pytest.raises(openai.APIError):
            list(client.completions.create(model="fake", prompt="a", stream=True))


def request_bytes(body):
    data = json.dumps(body).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {len(data)}", "\r\n"]).encode() + data


def connect(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def test_pages_come_back_when_clients_vanish():
    engine = FakeAsyncEngine(script=lambda r, i: "x" * 10_000, delay=0.002, max_model_len=10**6, max_running=6)
    pick = random.Random(0)
    with running(engine) as url:
        free = samples(httpx.get(f"{url}/metrics").text)['pagedjax:kv_pages{model_name="fake",state="free"}']
        open_sockets = []
        for _ in range(40):
            body = {
                "prompt": ["a" * 40] * pick.choice([1, 1, 3]),
                "n": pick.choice([1, 2]),
                "stream": pick.random() < 0.5,
                "max_tokens": 10_000,
                "ignore_eos": True,
            }
            client = connect(url)
            data = request_bytes(body)
            client.sendall(data[: pick.choice([len(data), len(data), len(data) // 2])])
            open_sockets.append((time.monotonic() + pick.uniform(0, 0.2), client))
            time.sleep(0.005)
        for when, client in open_sockets:
            time.sleep(max(0, when - time.monotonic()))
            client.close()
        wait_until(lambda: not engine.running and not engine.waiting)
        assert engine.aborted
        found = samples(httpx.get(f"{url}/metrics").text)
        assert found['pagedjax:kv_pages{model_name="fake",state="free"}'] == free
        assert found['pagedjax:num_requests_running{model_name="fake"}'] == 0
        assert found['pagedjax:num_requests_waiting{model_name="fake"}'] == 0
        engine.script = lambda r, i: "ok"
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).json()["choices"][0]["text"] == "ok"


def test_a_client_that_does_not_read_is_given_up():
    engine, closed = FakeAsyncEngine(config(send_seconds=0.3)), threading.Event()

    async def generate(request):
        try:
            while True:
                await asyncio.sleep(0)
                yield RequestOutput(request.request_id, (1,), [CompletionOutput(0, "x" * 10**6, [1])], finished=False)
        finally:
            closed.set()

    engine.generate = generate
    with running(engine) as url, connect(url) as client:
        client.sendall(request_bytes({"prompt": "a", "stream": True}))
        assert closed.wait(20)


@pytest.mark.parametrize("data", [b"", b"GET /health HTT", b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: 1\r\n"])
def test_a_head_that_does_not_arrive_is_given_up(data):
    with running(FakeAsyncEngine(config(receive_seconds=0.3))) as url, connect(url) as client:
        client.sendall(data)
        started = time.monotonic()
        assert client.recv(1000) == b""
        assert 0.2 < time.monotonic() - started < 5


def test_a_head_that_trickles_is_given_up():
    with running(FakeAsyncEngine(config(receive_seconds=0.3))) as url, connect(url) as client:
        deadline = time.monotonic() + 5
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < deadline:
                client.sendall(b"G")
                time.sleep(0.05)
        assert time.monotonic() < deadline


@pytest.mark.parametrize("headers", [{"X": "x" * 100_000}, {"X": "x" * 5000}, {f"X-{i}": "" for i in range(300)}])
def test_a_huge_head_is_refused(headers):
    with running(FakeAsyncEngine(config(max_header_bytes=4096))) as url:
        assert httpx.get(f"{url}/health", headers={"X": "x" * 3000}).status_code == 200
        with contextlib.suppress(httpx.HTTPError):  # the connection may be closed before all of it is sent
            assert httpx.get(f"{url}/health", headers=headers).status_code in (400, 431)


def test_a_connection_is_kept_for_further_requests():
    with running(FakeAsyncEngine(config(receive_seconds=0.5))) as url, httpx.Client() as client:
        for _ in range(3):
            assert client.get(f"{url}/health").status_code == 200
            time.sleep(0.3)  # longer in sum than a head may take


def test_a_port_in_use_is_one_clear_error():
    with running(FakeAsyncEngine()) as url:
        port = int(url.rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match=rf"config\.server\.port: cannot listen on 127\.0\.0\.1:{port}"):
            run.bind(ServerConfig(port=port))
    with pytest.raises(ConfigError, match="cannot listen"):
        run.bind(ServerConfig(host="203.0.113.1"))


@contextlib.contextmanager
def process(drain, mode="quick"):
    """A server process and its address; dead at the end."""
    command = [sys.executable, "-m", "tests.server.scripted_server", str(drain), mode]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        url = child.stdout.readline().strip()
        assert url, child.stderr.read()
        yield child, url
    finally:
        child.kill()
        child.communicate()


@contextlib.contextmanager
def stream(url):
    """An open stream that has delivered its first event; yields its lines."""
    body = {"prompt": "a", "stream": True, "max_tokens": 4000}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as response:
        assert response.status_code == 200
        lines = (line for line in response.iter_lines() if line)
        assert next(lines).startswith("data: {")
        yield lines


def test_sigterm_lets_running_requests_end_and_refuses_new_ones():
    with process(20) as (child, url), stream(url) as lines:
        child.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 503, 5)
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert "retry-after" in refused.headers
        *_, before, last = lines
        assert '"finish_reason":"stop"' in before
        assert last == "data: [DONE]"
        assert child.wait(10) == 0


def test_the_drain_has_an_end():
    with process(0.3, "stuck") as (child, url), stream(url):
        child.send_signal(signal.SIGTERM)
        assert child.wait(15) == 0


def test_a_second_signal_aborts():
    with process(60, "stuck") as (child, url), stream(url):
        child.send_signal(signal.SIGINT)
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 503, 5)
        child.send_signal(signal.SIGINT)
        assert child.wait(10) == 0


def test_an_idle_server_stops_at_once():
    with process(60) as (child, _):
        started = time.monotonic()
        child.send_signal(signal.SIGTERM)
        assert child.wait(10) == 0
        assert time.monotonic() - started < 5


def test_the_process_ends_with_an_error_when_the_engine_dies():
    with process(60, "dies") as (child, url):
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 503, 5)
        assert child.wait(15) == 1
