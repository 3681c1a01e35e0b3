"""What a model is, read without its weights: the same as loading finds, from every kind of place."""

import pytest

from pagedjax.errors import ModelLoadError
from pagedjax.weights import load_model, read_spec, read_tokenizer, save_checkpoint
from tests.models.harness import random_checkpoint
from tests.weights.files import block_spec, write_folder, write_gguf

TEXT = "naïve 12  words"


def place(tmp_path, kind):
    spec = block_spec()
    if kind == "folder":
        return write_folder(tmp_path / "model", spec, random_checkpoint(spec))
    if kind in ("gguf", "blob"):
        path = tmp_path / ("model.gguf" if kind == "gguf" else "model")
        write_gguf(path, spec, random_checkpoint(spec))
        return path
    if kind == "folder of gguf":
        folder = tmp_path / "some"
        folder.mkdir()
        write_gguf(folder / "model.gguf", spec, random_checkpoint(spec))
        return folder
    loaded = load_model(write_folder(tmp_path / "source", spec, random_checkpoint(spec)), "float32")
    save_checkpoint(loaded, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("kind", ["folder", "gguf", "blob", "folder of gguf", "checkpoint"])
def test_the_same_as_loading_finds(tmp_path, kind):
    path = place(tmp_path, kind)
    loaded = load_model(path, "float32")
    name, spec = read_spec(path)
    assert name == "model"
    assert spec == loaded.spec
    tokenizer = read_tokenizer(path)
    if loaded.tokenizer is None:
        assert tokenizer is None
    else:
        assert tokenizer.encode(TEXT) == loaded.tokenizer.encode(TEXT)


def test_from_the_hub_without_weights(tmp_path, monkeypatch):
    import huggingface_hub

    folder, asked = place(tmp_path, "folder"), {}

    def download(name, **arguments):
        asked.update(arguments)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert read_spec("owner/name") == ("owner/name", block_spec())
    assert "config.json" not in asked["ignore_patterns"]
    assert not any("safetensors" in pattern for pattern in asked["allow_patterns"])


def test_errors_name_the_place(tmp_path):
    with pytest.raises(ModelLoadError, match="no such file or folder"):
        read_spec(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"architectures": ["T5"]}')
    with pytest.raises(ModelLoadError, match=rf"{tmp_path}.*unsupported architecture: T5"):
        read_spec(tmp_path)
