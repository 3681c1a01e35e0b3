#!/usr/bin/env python3
"""Where a decode step's time goes: linear layers, attention, KV write, head, sampling, page verbs, host.

  .venv/bin/python scripts/bench_step.py --rows=64 --context=192 --output=benchmarks/step.json
  .venv/bin/python scripts/bench_step.py --model=random:llama-3-8b --context=1024

Each part runs alone in a device loop of its own, over the model's weights and shapes; "model" is all of its forward pass
with an argmax; the whole step is the engine's own decode loop. Parts do not add up to the whole exactly: alone they find
warmer caches. What the engine adds to the model (page verbs, sampling, rows, host) is "outside the model". The host's share
is measured on the engine: the wall time of whole turns less the time inside device dispatches.
"""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import machine
import numpy as np
from absl import app, flags
from flax import nnx
from jax import lax
from pagedjax_kernels import init_cache, kv_update, paged_attention
from random_models import PREFIX, random_model

from pagedjax import Request, SamplingParams
from pagedjax.config import Config
from pagedjax.engine import Engine, build_engine
from pagedjax.nn import Batch, linear, rms_norm
from pagedjax.options import with_overrides
from pagedjax.sampling import init_row_sampling, init_token_counts, sample

_MODEL = flags.DEFINE_string(
    "model", "default", "as config.model.path, or random:NAME[:LAYERS], NAME smollm2-135m or llama-3-8b: random weights"
)
_ROWS = flags.DEFINE_integer("rows", 64, "sequences that decode")
_CONTEXT = flags.DEFINE_integer("context", 192, "tokens each has")
_STEPS = flags.DEFINE_integer("steps", 16, "steps a measurement")
_REPEAT = flags.DEFINE_integer("repeat", 5, "measurements; the best counts")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "weights, activations and KV pages")
_OUTPUT = flags.DEFINE_string("output", "", "where to write the figures as JSON")


def best_ms(run: Callable[[], object]) -> float:
    """Best milliseconds a step; `run` does `--steps` steps and gives something to wait for."""
    jax.block_until_ready(run())
    times = []
    for _ in range(_REPEAT.value):
        started = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - started)
    return min(times) * 1e3 / _STEPS.value


def loop(step: Callable, *args: object) -> Callable[[], object]:
    """`step(carry, *args) -> carry`, `--steps` times in one program; the carry (args[0]) is donated and fed back."""
    n = _STEPS.value
    program = jax.jit(lambda carry, rest: lax.fori_loop(0, n, lambda _, c: step(c, *rest), carry), donate_argnums=0)
    state = [args[0]]

    def run() -> object:
        state[0] = program(state[0], args[1:])
        return state[0]

    return run


def parts(engine: Engine) -> dict[str, float]:
    """Milliseconds a step of each part."""
    model, spec, B = engine.loaded.model, engine.loaded.spec, _ROWS.value
    dtype, L = model.dtype, spec.num_layers
    layers = model.layers.arrays()
    graph, params = nnx.split(model)
    pages_per_row = -(-(_CONTEXT.value + 1) // 16)
    table = jnp.asarray(1 + np.random.default_rng(0).permutation(B * pages_per_row).reshape(B, -1), jnp.int32)
    cache = init_cache(L, B * pages_per_row + 1, 16, spec.num_kv_heads, spec.head_dim, dtype)
    x = jnp.ones((B, spec.hidden_size), dtype)
    q = jnp.ones((B, spec.num_heads, spec.head_dim), dtype)
    kv = jnp.ones((B, spec.num_kv_heads, spec.head_dim), dtype)
    kv_lens = jnp.full(B, _CONTEXT.value, jnp.int32)
    cu = jnp.arange(B + 1, dtype=jnp.int32)
    slots = table[:, -1] * 16
    index = jnp.arange(L, dtype=jnp.int32)

    def linears(x, layers):
        def layer(x, w):
            qkv = linear(rms_norm(x, w["attention_norm"], spec.norm_eps), w["qkv"]).astype(dtype)
            heads = qkv[:, :, :-2].reshape(B, spec.num_heads, spec.head_dim)
            x = x + linear(heads, w["out"], num_contracted=3).astype(dtype)
            y = linear(rms_norm(x, w["mlp_norm"], spec.norm_eps), w["gate_up"])
            y = (jax.nn.silu(y[:, 0]) * y[:, 1]).astype(dtype)
            return x + linear(y, w["down"]).astype(dtype), None

        return lax.scan(layer, x, layers)[0]

    def attention(q, cache, table, kv_lens):
        def layer(q, i):
            return paged_attention(q, cache, i, table, kv_lens, cu, max_q_len=1).astype(dtype), None

        return lax.scan(layer, q, index)[0]

    def write(cache, kv):
        return lax.scan(lambda c, i: (kv_update(c, kv, kv, i, slots), None), cache, index)[0]

    def head(x, params):
        return x + nnx.merge(graph, params).logits(x).max(-1, keepdims=True).astype(dtype)

    sampling, counts = init_row_sampling(B, spec.vocab_size), init_token_counts(B, spec.vocab_size)
    logits = jax.random.normal(jax.random.key(0), (B, spec.vocab_size))
    rows = jnp.arange(B, dtype=jnp.int32)

    def greedy(tokens, logits):
        out = sample(logits + tokens[:, None], sampling, rows, counts, positions=rows, num_generated=rows)
        return out.tokens.astype(jnp.float32) * 1e-9

    def forward(carry, params, table, kv_lens):
        cache, tokens = carry
        batch = Batch(tokens, kv_lens - 1, slots[None], table[None], kv_lens, cu, max_q_len=1)
        merged = nnx.merge(graph, params)
        hidden, cache = merged(batch, cache)
        return cache, jnp.argmax(merged.logits(hidden), axis=-1).astype(jnp.int32)

    write_ms = best_ms(loop(write, cache, kv))
    cache = init_cache(
        L, B * pages_per_row + 1, 16, spec.num_kv_heads, spec.head_dim, dtype
    )  # the last one was donated
    return {
        "linear layers": best_ms(loop(linears, x, layers)),
        "attention": best_ms(loop(attention, q, cache, table, kv_lens)),
        "head": best_ms(loop(head, jnp.ones(x.shape, dtype), params)),
        "sampling": best_ms(loop(greedy, jnp.zeros(B, jnp.float32), logits)),
        "KV write": write_ms,
        "model": best_ms(loop(forward, (cache, jnp.zeros(B, jnp.int32)), params, table, kv_lens)),
    }


def whole(engine: Engine) -> dict[str, float]:
    """Milliseconds a step of the engine, and the host's share of its turns."""
    runner = engine.runner
    inside = 0.0

    def timed(call: Callable) -> Callable:
        def run(*args, **kwargs):
            nonlocal inside
            started = time.perf_counter()
            out = call(*args, **kwargs)
            inside += time.perf_counter() - started
            return out

        return run

    for name in ("admit", "settle", "mixed", "start_decode", "finish_decode"):
        setattr(runner, name, timed(getattr(runner, name)))
    rng = np.random.default_rng(0)
    half = _CONTEXT.value - _STEPS.value // 2
    prompts = [tuple(rng.integers(100, engine.vocab_size - 100, half).tolist()) for _ in range(_ROWS.value)]

    def add(label: str, max_tokens: int) -> None:
        text = engine.tokenizer is not None
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=text)
        for i, ids in enumerate(prompts):
            engine.add_request(Request(f"{label}-{i}", ids, sampling))

    def run_until_all_decode() -> None:
        """No step with a chunk of a prompt may count: from here on every row has its first token."""
        started: set[str] = set()
        while len(started) < len(prompts):
            started |= {out.request_id for out in engine.step()}

    # Compiles what is not compiled yet, and lets the engine measure its steps.
    add("fill", _STEPS.value + 2)
    while engine.has_unfinished():
        engine.step()
    best = {"whole step": float("inf"), "host share": float("nan")}
    for turn in range(_REPEAT.value):
        add(str(turn), _STEPS.value + 16)
        run_until_all_decode()
        inside, steps, started = 0.0, engine.counters.steps, time.perf_counter()
        while len(engine.request_ids) == len(prompts):
            engine.step()
        wall, steps = time.perf_counter() - started, engine.counters.steps - steps
        host = (wall - inside) / wall
        while engine.has_unfinished():
            engine.step()
        if wall / steps * 1e3 < best["whole step"]:
            best = {"whole step": wall / steps * 1e3, "host share": host}
    return best


def main(argv: list[str]) -> None:
    del argv
    longest = max(512, 2 * _CONTEXT.value)
    options = {
        "model.dtype": _DTYPE.value,
        "model.max_model_len": longest,
        "scheduler.max_num_seqs": _ROWS.value,
        "cache.num_pages": 1 + _ROWS.value * -(-(_CONTEXT.value + _STEPS.value + 32) // 16) + -(-longest // 16),
        "cache.prefix_caching": False,
        # One size of each program, compiled when it is first used: other sizes are not measured.
        "runner.warm_up": False,
        "runner.lane_buckets": (_ROWS.value,),
        "runner.token_buckets": (512,),
        "runner.overlap": False,  # a loop in flight would be in the wall time, but not in the count of steps
    }
    if _MODEL.value.startswith(PREFIX):
        loaded = random_model(_MODEL.value, _DTYPE.value)
    else:
        options["model.path"], loaded = _MODEL.value, None
    engine = build_engine(with_overrides(Config(), options), loaded=loaded, progress=False)
    figures = whole(engine)
    figures |= parts(engine)
    figures["outside the model"] = 1 - figures["model"] / figures["whole step"]
    figures["tokens per second"] = _ROWS.value / figures["whole step"] * 1e3
    units = {"host share": "of the wall time", "outside the model": "of the whole step", "tokens per second": ""}
    for name, value in figures.items():
        print(f"{name:18s} {value:10.3f} {units.get(name, 'ms')}")
    if _OUTPUT.value:
        info = {
            "machine": machine.describe(),
            "jax": jax.__version__,
            "model": _MODEL.value,
            "device": jax.devices()[0].device_kind,
            "dtype": _DTYPE.value,
        }
        info |= {"rows": _ROWS.value, "context": _CONTEXT.value, "command": machine.command(), "figures": figures}
        pathlib.Path(_OUTPUT.value).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(_OUTPUT.value).write_text(json.dumps(info, indent=1))


if __name__ == "__main__":
    app.run(main)
