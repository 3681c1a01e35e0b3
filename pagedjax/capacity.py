"""Says how many tokens and concurrent requests of a model fit on a device, with pages and without.

usage: python -m pagedjax.capacity [--model=MODEL] [--memory=MEMORY] [--lengths=PROMPT/OUTPUT,...] [flags]

MODEL is what can be served (default, gemma3-270m, a folder, a config.json, a .gguf file, a checkpoint, owner/name on
Hugging Face), or one that the literature refers to: opt-13b, opt-66b, opt-175b, llama-7b, llama-13b, llama-2-70b,
llama-3-8b, llama-3-70b. No weights are read. MEMORY is a number of GiB or a card.

  python -m pagedjax.capacity --model=llama-3-8b --memory=H100-80GB
  python -m pagedjax.capacity --model=opt-13b --weight_dtype=float16 --kv_memory=12   (table 1 of the PagedAttention paper)

The counts are closed forms of the sizes; where weights and activations leave less than they take, say so by
--memory_fraction or --kv_memory. Requests under "paged, mean" need preemption now and then: it is an average.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import sys
from typing import Any

import jax

from pagedjax import command_line
from pagedjax.errors import ConfigError, ModelLoadError
from pagedjax.models.shapes import REFERENCE_SHAPES, ModelShape, shape_of
from pagedjax.options import option
from pagedjax.pages.schemes import RequestShape
from pagedjax.planning import CARDS, DTYPE_BYTES, Question, make_plan, parse_lengths, parse_memory

_PUBLISHED = (RequestShape(161, 338), RequestShape(19, 58))
"""Mean prompt and output of ShareGPT and of Alpaca in the PagedAttention paper (figure 11)."""


@dataclasses.dataclass(frozen=True)
class CapacityOptions:
    """The flags."""

    model: str = option("default", "the model, see above")
    memory: str = option(
        "A100-40GB", f"of one device: GiB (24, 24GiB), decimal GB (24GB), or one of {', '.join(CARDS)}"
    )
    kv_memory: str = option("", "for the pages of one device, in the same terms; empty: what the rest leaves")
    weight_dtype: str = option("bfloat16", "of the weights", choices=tuple(DTYPE_BYTES))
    kv_dtype: str = option("bfloat16", "of the pages; int8 and float8_e4m3fn keep scales", choices=tuple(DTYPE_BYTES))
    page_size: int = option(16, "tokens in a page", low=1, high=256)
    memory_fraction: float = option(0.85, "share of the memory to use", low=0.05, high=1.0)
    tensor_parallel: int = option(1, "devices that share the model", low=1, high=4096)
    max_len: int = option(0, "longest sequence allowed, in tokens; 0: the model's context", low=0, high=2**24)
    lengths: tuple[str, ...] = option(
        (),
        "requests to count, prompt/output in tokens; empty: the means of ShareGPT and Alpaca, and half of max_len each",
    )
    shared_prefix: int = option(0, "tokens that all prompts begin with", low=0, high=2**24)
    chunk_tokens: int = option(256, "of the scheme with fixed-size chunks", low=1, high=2**20)
    max_num_batched_tokens: int = option(512, "tokens in one step, for the activations", low=1, high=65536)
    max_num_seqs: int = option(64, "rows in one step, for the activations", low=1, high=4096)
    plot: str = option("", "PNG file to write")
    json: str = option("", "JSON file to write; -: standard output, in place of the tables")


def question_of(given: CapacityOptions) -> Question:
    """The flags as a question. ConfigError and ModelLoadError name the flag or the file."""
    shape = find_shape(given.model)
    max_len = given.max_len or shape.max_len
    lengths = parse_lengths("--lengths", given.lengths)
    if not lengths:
        halves = RequestShape(max(max_len // 2, 1), max(max_len - max_len // 2, 1)) if max_len > 1 else None
        lengths = tuple(x for x in (*_PUBLISHED, halves) if x is not None and x.total <= max_len)
        lengths = tuple(x for x in lengths if x.prompt >= given.shared_prefix)
        if not lengths and given.shared_prefix:
            raise ConfigError(
                f"--shared_prefix: no prompt of the lengths looked at has {given.shared_prefix} tokens; give --lengths"
            )
    return Question(
        shape=shape,
        device_bytes=parse_memory("--memory", given.memory),
        cache_bytes=parse_memory("--kv_memory", given.kv_memory) if given.kv_memory else 0,
        weight_dtype=given.weight_dtype,
        kv_dtype=given.kv_dtype,
        page_size=given.page_size,
        fraction=given.memory_fraction,
        devices=given.tensor_parallel,
        max_len=max_len,
        lengths=lengths,
        shared_prefix=given.shared_prefix,
        chunk_tokens=given.chunk_tokens,
        step_tokens=given.max_num_batched_tokens,
        step_rows=given.max_num_seqs,
    )


def find_shape(model: str) -> ModelShape:
    """The sizes of a model by reference name, file, folder or Hugging Face id."""
    if model.lower() in REFERENCE_SHAPES and not os.path.exists(model):
        return REFERENCE_SHAPES[model.lower()]
    from pagedjax.weights import read_spec  # a moment to import

    try:
        name, spec = read_spec(model)
    except ModelLoadError as error:
        near = difflib.get_close_matches(model.lower(), REFERENCE_SHAPES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"by name there are {', '.join(REFERENCE_SHAPES)}, too"
        raise ModelLoadError(f"{error}; {hint}") from None
    return shape_of(spec, name)


def main(given: CapacityOptions) -> int:
    question = question_of(given)
    plan = make_plan(question)
    if given.plot:
        if not plan.lines:
            raise ConfigError("--plot: no length to draw; give --lengths")
        from pagedjax.planning.plot import plot_plan

        plot_plan(plan, given.plot)
    record: dict[str, Any] = {"question": dataclasses.asdict(given), **plan.to_json()}
    if given.json == "-":
        json.dump(record, sys.stdout, indent=2)
        print()
        return 0
    if given.json:
        try:
            with open(given.json, "w", encoding="utf-8") as file:
                json.dump(record, file, indent=2)
                file.write("\n")
        except OSError as error:
            raise ConfigError(f"--json={given.json}: {error.strerror}") from None
    from rich.console import Console

    from pagedjax.planning.table import print_plan

    print_plan(plan, question, Console())
    return 0


if __name__ == "__main__":
    # Nothing is computed on a device: an accelerator would be claimed for nothing.
    jax.config.update("jax_platforms", "cpu")
    command_line.run(main, __doc__ or "", [CapacityOptions], schema=None)
