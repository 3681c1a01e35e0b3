"""Converts a model into an Orbax checkpoint that loads without any decoding.

python -m pagedjax.convert --model=default --output=smollm2 --dtype=bfloat16
python -m pagedjax.serve --config.model.path=smollm2
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from absl import app, flags
from flax import nnx

from pagedjax.errors import PagedJaxError
from pagedjax.weights import check_target, load_model, save_checkpoint

_MODEL = flags.DEFINE_string(
    "model",
    None,
    "a folder with safetensors, a .gguf file, a checkpoint, a Hugging Face id, or 'default'",
    required=True,
)
_OUTPUT = flags.DEFINE_string("output", None, "the folder to write", required=True)
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["float32", "bfloat16", "float16"], "of the weights written")
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "replace an existing checkpoint")


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    try:
        check_target(Path(_OUTPUT.value), _OVERWRITE.value)
        loaded = load_model(_MODEL.value, jnp.dtype(_DTYPE.value))
        save_checkpoint(loaded, _OUTPUT.value, overwrite=_OVERWRITE.value)
    except (PagedJaxError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    size = sum(x.nbytes for x in jax.tree.leaves(nnx.state(loaded.model)))
    print(f"wrote {loaded.name} to {_OUTPUT.value}: {size / 1e6:,.0f} MB of {_DTYPE.value} weights")
    return 0


if __name__ == "__main__":
    # Weights are only copied: an accelerator would be claimed for nothing.
    jax.config.update("jax_platforms", "cpu")
    app.run(main)
