"""Where a model may come from, and what is said when it does not."""

from __future__ import annotations

import pytest

from pagedjax.errors import ModelLoadError
from pagedjax.weights import hub, load_model
from tests.models.harness import random_checkpoint
from tests.weights.files import block_spec, write_folder, write_gguf


def test_a_folder_with_one_gguf_file(tmp_path):
    spec = block_spec()
    write_gguf(tmp_path / "a.gguf", spec, random_checkpoint(spec))
    assert load_model(tmp_path, "float32").name == "a"
    (tmp_path / "a.gguf").rename(tmp_path / "blob")  # known by its content
    assert load_model(tmp_path / "blob", "float32").name == "blob"
    write_gguf(tmp_path / "b.gguf", spec, random_checkpoint(spec))
    write_gguf(tmp_path / "c.gguf", spec, random_checkpoint(spec))
    with pytest.raises(ModelLoadError, match=r"2 GGUF files; give the path of one of them: b\.gguf, c\.gguf"):
        load_model(tmp_path, "float32")


def test_paths_that_are_no_model(tmp_path):
    with pytest.raises(ModelLoadError, match=r"no such file or folder\. Give a folder with config\.json"):
        load_model(tmp_path / "nowhere", "float32")
    with pytest.raises(ModelLoadError, match="it holds nothing"):
        load_model(tmp_path, "float32")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelLoadError, match=r"it holds notes\.txt"):
        load_model(tmp_path, "float32")
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        load_model(tmp_path / "notes.txt", "float32")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="give the folder"):
        load_model(tmp_path / "model.safetensors", "float32")


@pytest.mark.parametrize("path", ["owner/name", "owner/name.v1-2@main", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_hub_ids(path):
    assert hub.is_model_id(path)


@pytest.mark.parametrize(
    "path", ["name", "./owner/name", "/owner/name", "a/b/c", "../name", "dir/file.gguf", "~/x", ""]
)
def test_paths_are_not_hub_ids(path):
    assert not hub.is_model_id(path)


def test_a_model_from_the_hub(tmp_path, monkeypatch):
    import huggingface_hub

    spec, asked = block_spec(), {}
    folder = write_folder(tmp_path / "snapshot", spec, random_checkpoint(spec))

    def download(name, **arguments):
        asked.update(arguments, name=name)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load_model("owner/tiny@v2", "float32").name == "owner/tiny@v2"
    assert (asked["name"], asked["revision"]) == ("owner/tiny", "v2")
    assert not any(".py" in pattern or ".bin" in pattern for pattern in asked["allow_patterns"])
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="publishes no safetensors"):
        load_model("owner/tiny", "float32")

    def fail(name, **arguments):
        raise OSError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelLoadError, match=r"(?s)'owner/tiny' is neither a local path.*offline.*HF_TOKEN"):
        load_model("owner/tiny", "float32")
