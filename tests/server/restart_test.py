"""A server that is stopped leaves its prefix cache behind, and the next one begins with it."""

import os
import re
import signal
import stat
import subprocess
import sys

import httpx
import jax.numpy as jnp
import pytest

from pagedjax.models import Llama
from pagedjax.weights import LoadedModel, save_checkpoint
from tests.models.harness import random_checkpoint, tiny_spec
from tests.server.fakes import TOKENIZER


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a tiny checkpoint."""
    spec = tiny_spec(num_layers=1, vocab_size=258, max_position_embeddings=256)
    weights = Llama.load(spec, random_checkpoint(spec, seed=3), jnp.float32)
    folder = tmp_path_factory.mktemp("model") / "tiny"
    save_checkpoint(LoadedModel(weights, spec, TOKENIZER, "tiny", (TOKENIZER.eos_token_id,)), folder)
    return folder


def serve(model, folder):
    command = [
        *(sys.executable, "-m", "pagedjax.serve", f"--config.model.path={model}", "--config.model.dtype=float32"),
        *(
            "--config.server.port=0",
            "--config.scheduler.max_num_seqs=8",
            "--config.scheduler.max_num_batched_tokens=64",
        ),
        *("--config.runner.token_buckets=64", "--config.cache.num_pages=33", "--config.runner.warm_up=false"),
        *(f"--config.runner.compilation_cache={model.parent}", "--config.server.drain_seconds=5"),
        *(f"--config.snapshot.load={folder}", f"--config.snapshot.save_on_exit={folder}"),
    ]
    environment = {**os.environ, "PAGEDJAX_API_KEYS": "one,two"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def url_of(child):
    printed = []
    for line in child.stdout:
        printed.append(line)
        if found := re.search(r"http://127\.0\.0\.1:\d+", line):
            return found[0]
    raise AssertionError("".join(printed))


def cached(url, key):
    """Prompt tokens that the prefix cache had."""
    body = {"prompt": "x" * 100, "max_tokens": 4, "temperature": 0}
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def stop(child):
    child.send_signal(signal.SIGTERM)
    text, _ = child.communicate(timeout=60)
    assert child.returncode == 0, text
    return text


def test_a_restarted_server_has_its_prefixes(model, tmp_path):
    folder = tmp_path / "snapshot"
    first = serve(model, folder)
    try:
        assert cached(url_of(first), "one") == 0
        assert "the prefix cache is saved in" in stop(first)
    finally:
        first.kill()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    second = serve(model, folder)
    try:
        url = url_of(second)
        assert cached(url, "two") == 0  # the cache of one key is not that of another, before and after
        assert cached(url, "one") == 99
        stop(second)
    finally:
        second.kill()


def test_what_cannot_be_saved_or_loaded_is_one_line(model, tmp_path):
    (tmp_path / "file").touch()
    child = serve(model, tmp_path)
    text, _ = child.communicate(timeout=120)
    assert child.returncode == 1
    assert "is not a snapshot" in text
    assert "Traceback" not in text
