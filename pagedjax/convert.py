"""Converts a model into an Orbax checkpoint that loads without any decoding.

usage: python -m pagedjax.convert --model=MODEL --output=FOLDER [--dtype=DTYPE]

  python -m pagedjax.convert --model=default --output=smollm2 --dtype=bfloat16
  python -m pagedjax.serve --config.model.path=smollm2
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from pagedjax import command_line
from pagedjax.errors import ConfigError
from pagedjax.folders import check_folder_target
from pagedjax.options import option
from pagedjax.weights import check_target, load_model, save_checkpoint


@dataclasses.dataclass(frozen=True)
class ConvertOptions:
    """The flags."""

    model: str = option("", "a folder with safetensors, a .gguf file, a checkpoint, a Hugging Face id, or 'default'")
    output: str = option("", "the folder to write")
    dtype: str = option("bfloat16", "of the weights written", choices=("float32", "bfloat16", "float16"))
    overwrite: bool = option(False, "replace an existing checkpoint")


def main(given: ConvertOptions) -> int:
    for name in ("model", "output"):
        if not getattr(given, name):
            raise ConfigError(f"--{name}: needed; --help explains")
    try:
        check_target(Path(given.output), given.overwrite)
        check_folder_target("--output", str(Path(given.output).absolute().parent))
        loaded = load_model(given.model, jnp.dtype(given.dtype))
        save_checkpoint(loaded, given.output, overwrite=given.overwrite)
    except OSError as error:
        command_line.fail(error)
    size = sum(x.nbytes for x in jax.tree.leaves(nnx.state(loaded.model)))
    print(f"wrote {loaded.name} to {given.output}: {size / 1e6:,.0f} MB of {given.dtype} weights")
    return 0


if __name__ == "__main__":
    # Weights are only copied: an accelerator would be claimed for nothing.
    jax.config.update("jax_platforms", "cpu")
    command_line.run(main, __doc__ or "", [ConvertOptions], schema=None)
