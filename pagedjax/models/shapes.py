"""The numbers of a model that its memory depends on: of any that can be loaded, and of some that are only referred to."""

from __future__ import annotations

import dataclasses
import math

from pagedjax.models.groups import LayerGroups, layer_groups
from pagedjax.models.parameters import Parameter, layer_parameters, outer_parameters
from pagedjax.models.spec import ModelSpec

_SHARDED_AXES = ("vocab", "kv_head", "mlp")


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder.

    Attributes:
      num_layers, num_kv_heads, head_dim: L, K, D.
      hidden_size, intermediate_size, vocab_size: d, f, V.
      max_len: the longest context it was made for, in tokens.
      parts: (units, parameters of one unit) of each kind of weight. Units are what tensor parallelism deals out whole:
        KV heads with their query heads, columns of the MLP, rows of the vocabulary. One unit: every device has it.
      windows: as ModelSpec.windows.
    """

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_len: int
    parts: tuple[tuple[int, int], ...]
    windows: tuple[int, ...] = ()

    @property
    def groups(self) -> LayerGroups:
        """Which layers share a page table."""
        return layer_groups(self.num_layers, self.windows)

    def num_parameters(self, devices: int = 1) -> int:
        """Weights on each of so many devices: a device gets ceil(units / devices) units of every kind."""
        return sum(-(-units // devices) * each for units, each in self.parts)


def shape_of(spec: ModelSpec, name: str) -> ModelShape:
    """The sizes of a model that can be loaded; its parameters are those that `load_model` makes."""
    table = [*layer_parameters(spec).values(), *outer_parameters(spec).values()]
    return ModelShape(
        name=name,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        vocab_size=spec.vocab_size,
        max_len=spec.max_position_embeddings,
        parts=tuple(_part(parameter) for parameter in table),
        windows=spec.windows,
    )


def _part(parameter: Parameter) -> tuple[int, int]:
    size = math.prod(parameter.shape)
    units = next((n for n, axis in zip(parameter.shape, parameter.axes, strict=True) if axis in _SHARDED_AXES), 1)
    return units, size // units


def _opt(name: str, num_layers: int, hidden: int, heads: int) -> ModelShape:
    """OPT (Zhang et al., 2022): MLP of 4 x hidden without a gate, learned positions, biases everywhere, tied head."""
    vocab, positions, head_dim, mlp = 50_272, 2_050, hidden // heads, 4 * hidden
    parts = (
        (heads, num_layers * (4 * hidden * head_dim + 3 * head_dim)),  # q, k, v with biases, and the output projection
        (mlp, num_layers * (2 * hidden + 1)),
        (vocab, hidden),
        (
            1,
            num_layers * (4 * hidden + 2 * hidden) + positions * hidden + 2 * hidden,
        ),  # norms, output biases, positions
    )
    return ModelShape(name, num_layers, heads, head_dim, hidden, mlp, vocab, 2048, parts)


def _llama(name: str, *sizes: int) -> ModelShape:
    """Sizes: layers, hidden, intermediate, heads, KV heads, vocabulary, context. Head dim 128, untied head."""
    layers, hidden, mlp, heads, kv_heads, vocab, context = sizes
    spec = ModelSpec("LlamaForCausalLM", layers, hidden, heads, kv_heads, hidden // heads, mlp, vocab, context)
    return shape_of(spec, name)


REFERENCE_SHAPES = {
    shape.name: shape
    for shape in (
        _opt("opt-13b", 40, 5120, 40),
        _opt("opt-66b", 64, 9216, 72),
        _opt("opt-175b", 96, 12288, 96),
        _llama("llama-7b", 32, 4096, 11008, 32, 32, 32_000, 2048),
        _llama("llama-13b", 40, 5120, 13824, 40, 40, 32_000, 2048),
        _llama("llama-2-70b", 80, 8192, 28672, 64, 8, 32_000, 4096),
        _llama("llama-3-8b", 32, 4096, 14336, 32, 8, 128_256, 8192),
        _llama("llama-3-70b", 80, 8192, 28672, 64, 8, 128_256, 8192),
    )
}
"""Models that the literature refers to, by name. Nothing of them is loaded."""
