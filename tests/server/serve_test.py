"""`python -m pagedjax.serve` as a stranger meets it: one command, the default model, the openai client, Ctrl-C."""

import re
import signal
import socket
import subprocess
import sys

import httpx
import openai
import pytest

SMALL = [
    "--config.server.port=0",
    "--config.scheduler.max_num_seqs=8",
    "--config.scheduler.max_num_batched_tokens=64",
    "--config.runner.token_buckets=64",
    "--config.cache.num_pages=257",
]


def serve(*arguments):
    command = [sys.executable, "-m", "pagedjax.serve", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture(scope="module")
def server():
    """(process, what it printed until it was ready, address)"""
    child = serve(*SMALL)
    printed = []
    try:
        for line in child.stdout:
            printed.append(line)
            if "-d '" in line:
                break
        text = "".join(printed)
        assert child.poll() is None, text
        yield child, text, re.search(r"http://127\.0\.0\.1:\d+", text)[0]
    finally:
        child.kill()
        child.communicate()


@pytest.mark.model
def test_what_is_the_capital_of_france(server):
    _, _, url = server
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        (model,) = client.models.list()
        ask = {"model": model.id, "messages": messages, "temperature": 0, "max_tokens": 32}
        whole = client.chat.completions.create(**ask).choices[0].message.content
        assert "Paris" in whole
        chunks = client.chat.completions.create(**ask, stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole


@pytest.mark.model
def test_the_printed_command_works(server):
    _, text, url = server
    command = text[text.index("curl ") :].replace("\\\n", " ").strip()
    assert command.startswith(f"curl {url}/v1/chat/completions")
    # The same request without needing curl.
    data = re.search(r"-d '(.*)'$", command, re.DOTALL)[1].replace("'\\''", "'")
    answer = httpx.post(
        f"{url}/v1/chat/completions", content=data, headers={"Content-Type": "application/json"}, timeout=60
    )
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]


@pytest.mark.model
def test_signals_end_it_cleanly(server):
    child, _, url = server
    assert httpx.get(f"{url}/health").status_code == 200
    child.send_signal(signal.SIGINT)
    assert child.wait(20) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config.model.path=/nowhere/at/all"], "/nowhere/at/all"),
        (["--config.server.host=0.0.0.0"], "allow_open"),
        (["--config.server.api_key_file=/nowhere"], "api_key_file"),
        (["--config.cache.page_sise=3"], "did you mean config.cache.page_size"),
    ],
)
def test_what_cannot_work_is_one_line(arguments, words):
    child = serve("--config.server.port=0", *arguments)
    text, _ = child.communicate(timeout=60)
    assert child.returncode == 1
    assert words in text
    assert "Traceback" not in text
    assert text.strip().splitlines()[-1].startswith("error: ")


def test_a_port_in_use_is_found_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        child = serve(f"--config.server.port={port}")
        text, _ = child.communicate(timeout=60)
    assert child.returncode == 1
    assert text == f"error: config.server.port: cannot listen on 127.0.0.1:{port}: Address already in use\n"
