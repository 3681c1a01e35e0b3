"""A model by its Hugging Face id: fetched once into huggingface_hub's own cache. Data only, no code, no pickles."""

from __future__ import annotations

import re
from pathlib import Path

from pagedjax.errors import ModelLoadError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]
_UNWANTED = ["*/*", "consolidated*"]  # other formats and duplicates live in subfolders
_WITHOUT_WEIGHTS = [pattern for pattern in _WANTED if pattern != "*.safetensors"]


def is_model_id(path: str) -> bool:
    """Whether a path that does not exist here may be a Hugging Face id: `owner/name`, or `owner/name@revision`."""
    return _ID.fullmatch(path) is not None and not path.endswith((".gguf", ".safetensors"))


def fetch_model(model_id: str) -> Path:
    """The folder of the fetched files. Without a network, what was fetched before is used.

    Raises:
      ModelLoadError: no such model, no access, no network, or a model without safetensors.
    """
    folder = _snapshot(model_id, _WANTED)
    if not any(folder.glob("*.safetensors")):
        raise ModelLoadError(
            f"{model_id!r} publishes no safetensors; pagedjax reads neither pickles nor other formats from the hub"
        )
    return folder


def fetch_description(model_id: str) -> Path:
    """The folder with config.json and the tokenizer's files, without the weights.

    Raises:
      ModelLoadError: no such model, no access, no network.
    """
    return _snapshot(model_id, _WITHOUT_WEIGHTS)


def _snapshot(model_id: str, patterns: list[str]) -> Path:
    import huggingface_hub

    name, _, revision = model_id.partition("@")
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, revision=revision or None, allow_patterns=patterns, ignore_patterns=_UNWANTED
            )
        )
    except Exception as error:  # the hub's client raises its own errors, httpx's and the system's
        raise ModelLoadError(
            f"{model_id!r} is neither a local path nor a model that could be fetched from Hugging Face: {error}\n"
            f"Check the name and the network, set HF_TOKEN for a private or gated model, or give a local path"
        ) from error
