"""pagedjax: a JAX-native LLM serving engine and research framework around PagedAttention.

from pagedjax import LLM, SamplingParams
print(LLM().generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedjax.types import Request, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from pagedjax.engine import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "Request", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str):
    # `from pagedjax.nn import PagedAttention` should not pay for the engine, so LLM is imported when asked for.
    if name == "LLM":
        from pagedjax.engine import LLM

        return LLM
    raise AttributeError(f"module 'pagedjax' has no attribute {name!r}")
