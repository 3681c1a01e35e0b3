"""A directory in Hugging Face's layout: config.json, safetensors, tokenizer files."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagedjax.errors import ModelLoadError
from pagedjax.weights.transformers_quietly import transformers

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. ModelLoadError names the file and says what is wrong."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: not valid JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: must be a JSON object, got {type(value).__name__}")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, with checkpoints refused that are quantised in a way of their own."""
    config = read_json(folder / "config.json")
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise ModelLoadError(
            f"{folder}: quantised by {method!r}, which is not supported; take unquantised safetensors or a GGUF file"
        )
    return config


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer by transformers, None where there is none. Runs no code from the folder.

    Raises:
      ModelLoadError: tokenizer files that cannot be used.
    """
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        logging.getLogger(__name__).warning("%s has no tokenizer files: only token ids can be served", folder)
        return None
    try:
        with warnings.catch_warnings():
            # It reads config.json on the way, and complains about spellings of its older versions.
            warnings.simplefilter("ignore", FutureWarning)
            return transformers().AutoTokenizer.from_pretrained(
                os.fspath(folder.resolve()), trust_remote_code=False, local_files_only=True
            )
    except Exception as error:  # transformers and tokenizers raise bare exceptions of many kinds
        raise ModelLoadError(f"{folder}: the tokenizer cannot be loaded: {error}") from error


def eos_ids(folder: Path, config: Mapping[str, Any], tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a sequence: of generation_config.json, else of config.json; and the tokenizer's own."""
    generation = folder / "generation_config.json"
    named = read_json(generation).get("eos_token_id") if generation.exists() else None
    named = config.get("eos_token_id") if named is None else named
    named = list(named) if isinstance(named, (list, tuple)) else [named]
    named.append(getattr(tokenizer, "eos_token_id", None))
    return tuple(dict.fromkeys(i for i in named if isinstance(i, int) and not isinstance(i, bool) and i >= 0))
