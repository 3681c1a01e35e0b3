"""Models from files: safetensors, GGUF, Orbax checkpoints, Hugging Face ids, and the default model."""

from pagedjax.weights.facts import read_spec as read_spec
from pagedjax.weights.facts import read_tokenizer as read_tokenizer
from pagedjax.weights.load import load_model as load_model
from pagedjax.weights.loaded import LoadedModel as LoadedModel
from pagedjax.weights.orbax import check_target as check_target
from pagedjax.weights.orbax import save_checkpoint as save_checkpoint
