"""Models that run on pages: the Llama family and Gemma 3."""

from pagedjax.models.gemma import Gemma3 as Gemma3
from pagedjax.models.groups import LayerGroups as LayerGroups
from pagedjax.models.llama import Llama as Llama
from pagedjax.models.registry import get_model as get_model
from pagedjax.models.spec import ModelSpec as ModelSpec
from pagedjax.models.spec import spec_from_hf as spec_from_hf
