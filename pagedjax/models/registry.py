"""Which class runs which architecture."""

from __future__ import annotations

from pagedjax.errors import ModelLoadError
from pagedjax.models.gemma import Gemma3
from pagedjax.models.llama import Llama
from pagedjax.models.spec import ARCHITECTURES

_MODELS: dict[str, type[Llama]] = {**dict.fromkeys(ARCHITECTURES, Llama), "Gemma3ForCausalLM": Gemma3}


def get_model(architecture: str) -> type[Llama]:
    """The model class of a Hugging Face architecture name. ModelLoadError names it and the supported ones."""
    if architecture not in _MODELS:
        raise ModelLoadError(f"unsupported architecture: {architecture}; supported are {', '.join(_MODELS)}")
    return _MODELS[architecture]
