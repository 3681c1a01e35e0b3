"""A tiny random model behind a real engine, and the slow way to the same tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax import Request, RequestOutput, SamplingParams
from pagedjax.config import Config
from pagedjax.engine import Engine, from_loaded
from pagedjax.engine.llm import merge
from pagedjax.models import Llama
from pagedjax.options import with_overrides
from pagedjax.weights import LoadedModel
from tests.models.harness import random_checkpoint, tiny_spec
from tests.oracles import llama_oracle

SPEC = tiny_spec(num_layers=2, max_position_embeddings=2304)
EOS = 7


@functools.cache
def tensors() -> dict[str, np.ndarray]:
    return random_checkpoint(SPEC, seed=3)


@functools.cache
def loaded() -> LoadedModel:
    model = Llama.load(SPEC, tensors(), jnp.float32)
    return LoadedModel(model=model, spec=SPEC, tokenizer=None, name="tiny", eos_token_ids=(EOS,))


def make_engine(*, model: LoadedModel | None = None, hash_bits: int = 32, **overrides) -> Engine:
    """An engine with few, small programs, invariants checked after every dispatch; around `loaded()` by default."""
    defaults = {
        "model.dtype": "float32",
        "cache.page_size": 8,
        "cache.num_pages": 65,
        "scheduler.max_num_seqs": 8,
        "scheduler.max_num_batched_tokens": 32,
        "runner.lane_buckets": (8,),
        "runner.token_buckets": (32,),
        "runner.max_steps": 8,
        "runner.warm_up": False,
        "runner.check_every": 1,
        "runner.compilation_cache": "",
        "seed": 1,
    }
    names = {name.replace("__", "."): value for name, value in overrides.items()}
    config = with_overrides(Config(), {**defaults, **names})
    return share_programs(from_loaded(model or loaded(), config, progress=False, hash_bits=hash_bits))


@functools.lru_cache(maxsize=4)  # a process may map some 65,000 pieces of code, and programs are thousands
def _programs(shapes: str) -> list:
    return []


def share_programs(engine: Engine) -> Engine:
    """Engines of the same shapes use the same compiled programs: making them takes most of a test's time."""
    runner = engine.runner
    shapes = jax.tree.map(lambda x: (x.shape, str(x.dtype)), (runner._params, runner._state))
    programs = runner.programs
    same = _programs(
        f"{shapes} {programs._spec} {programs._backend} {runner.buckets} {runner.buffer_steps} "
        f"{runner._state.pages.hash_bits} {runner.allocation}"
    )
    # Compiling takes several times longer than running here. The models of the golden tests are compiled as for users.
    runner.programs.compiler_options = {"xla_backend_optimization_level": 0}
    same.append(runner.programs)
    runner.programs = same[0]
    return engine


def params(**fields) -> SamplingParams:
    """Greedy, ids only, past EOS, unless said otherwise."""
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "detokenize": False, "max_tokens": 12, **fields})


def run(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams], **fields
) -> list[RequestOutput]:
    """All prompts at once; outputs in their order."""
    many = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    done: dict[str, RequestOutput] = {}
    for i, (prompt, one) in enumerate(zip(prompts, many, strict=True)):
        engine.add_request(Request(str(i), tuple(prompt), one, **fields))
    for _ in range(10_000):
        if not engine.has_unfinished():
            break
        for delta in engine.step():
            done[delta.request_id] = merge(done.get(delta.request_id), delta)
    assert not engine.has_unfinished(), "the engine does not come to an end"
    return [done[str(i)] for i in range(len(prompts))]


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in outputs]


@functools.cache
def greedy(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """The oracle: whole sequences through numpy, one argmax a token. Raises where a near tie would excuse a difference."""
    ids = list(prompt)
    for _ in range(num_tokens):
        logits = llama_oracle.forward(SPEC, tensors(), ids)[-1]
        best, second = np.sort(logits)[[-1, -2]]
        assert best - second > 1e-3, "choose another prompt: a near tie"
        ids.append(int(np.argmax(logits)))
    return ids[len(prompt) :]


def random_prompts(num: int, low: int, high: int, seed: int) -> list[tuple[int, ...]]:
    """Prompts of low to high - 1 tokens, none of them EOS."""
    rng = np.random.default_rng(seed)
    return [tuple(int(t) for t in rng.integers(8, SPEC.vocab_size, rng.integers(low, high))) for _ in range(num)]


def assert_clean(engine: Engine) -> None:
    """Every page is free or cached, and no rule is broken."""
    assert engine.runner.check() == []
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.pages_free + stats.pages_cached == stats.pages_total
