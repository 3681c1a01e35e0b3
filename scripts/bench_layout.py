#!/usr/bin/env python3
"""What adjoining pages bring: decode attention over scattered and over contiguous page tables, by backend.

  .venv/bin/python scripts/bench_layout.py --output=benchmarks/layout.json

One layer of SmolLM2's shape; rows own `context` tokens each. Both layouts hold the same keys and values and are timed in
turns, so that a change of the machine hits both. And how much adjoins in practice: the share of steps from one logical page
to the next that lead to the next physical page, while requests come and go for a long time in a pool that is always full.
"""

from __future__ import annotations

import json
import pathlib
import time

import jax
import jax.numpy as jnp
import machine
import numpy as np
from absl import app, flags
from jax import lax
from pagedjax_kernels import init_cache, paged_attention

from pagedjax.pages import alloc, contiguity, init_pages, publish, remap

_ROWS = flags.DEFINE_integer("rows", 64, "sequences", lower_bound=1)
_CONTEXT = flags.DEFINE_integer("context", 1024, "tokens a sequence", lower_bound=1)
_PAGES = flags.DEFINE_list("page_sizes", ["8", "16", "64"], "tokens a page")
_BACKENDS = flags.DEFINE_list("backends", ["native_cpu", "xla"], "attention backends")
_REPEAT = flags.DEFINE_integer("repeat", 15, "timings of each layout; the best counts", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", "", "where to write the figures as JSON")
HEADS, KV_HEADS, DIM, STEPS = 9, 3, 64, 8


def time_layouts(page: int, backend: str) -> dict[str, float]:
    """Milliseconds of one attention call for each layout."""
    rows, per_row = _ROWS.value, -(-_CONTEXT.value // page)
    N = rows * per_row + 1
    cache = init_cache(1, N, page, KV_HEADS, DIM, jnp.bfloat16)
    ids = np.arange(1, N, dtype=np.int32)
    tables = {
        "contiguous": ids.reshape(rows, per_row),
        "scattered": np.random.default_rng(0).permutation(ids).reshape(rows, per_row),
    }
    q = jax.random.normal(jax.random.key(0), (rows, HEADS, DIM), jnp.bfloat16)
    lens, cu = jnp.full(rows, _CONTEXT.value, jnp.int32), jnp.arange(rows + 1, dtype=jnp.int32)

    @jax.jit
    def run(q, cache, table):
        def again(_, q):
            return paged_attention(q, cache, 0, table, lens, cu, max_q_len=1, scale=DIM**-0.5, backend=backend)

        return lax.fori_loop(0, STEPS, again, q)

    best = dict.fromkeys(tables, float("inf"))
    for turn in range(_REPEAT.value + 1):
        for name, table in tables.items():
            started = time.perf_counter()
            run(q, cache, jnp.asarray(table)).block_until_ready()
            if turn:  # the first compiles
                best[name] = min(best[name], (time.perf_counter() - started) / STEPS * 1e3)
    return best


def adjoining_share(requests: int = 1500, rows: int = 16, size: int = 16, N: int = 1601, longest: int = 100) -> float:
    """Mean `contiguity` of tables under churn: prompts of 20 pages on average, then 8 more taken one at a time."""
    rng = np.random.default_rng(0)
    pages = init_pages(num_pages=N, page_size=size, max_rows=rows, max_pages_per_row=longest)
    tokens = jax.random.randint(jax.random.key(0), (requests, longest * size), 0, 1000)
    grow, give, enter = (jax.jit(verb, donate_argnums=0) for verb in (alloc, remap, publish))
    share = jax.jit(contiguity)
    left, content, shares, begun = np.full(rows, -1), np.zeros(rows, int), [], 0
    everyone, nobody = jnp.arange(rows, dtype=jnp.int32), jnp.full(rows, rows, jnp.int32)
    while begun < requests:
        need = np.where((left > 0) & (rng.random(rows) < 0.3), 1, 0)
        for row in np.flatnonzero(left < 0)[:1]:
            need[row], left[row] = min(rng.geometric(1 / 20), 60), min(rng.geometric(1 / 8), 40)
            content[row], begun = begun, begun + 1
        pages, ok = grow(pages, everyone, jnp.asarray(need, jnp.int32))
        assert bool(ok.all()), "the pool holds all of them"
        left = np.where((left > 0) & (need == 1), left - 1, left)
        shares.append(float(share(pages)))
        ended = jnp.where(jnp.asarray(left == 0), everyone, rows)
        lengths = jnp.where(ended < rows, pages.num_pages * size, 0)
        pages, _ = enter(pages, ended, tokens[content], lengths, everyone * 0)
        pages = give(pages, ended, nobody)[0]
        left[left == 0] = -1
    return float(np.mean(shares[len(shares) // 2 :]))


def main(argv: list[str]) -> None:
    del argv
    share = adjoining_share()
    print(f"steps to the next page that adjoin, under churn: {share:.0%}")
    figures = {}
    for backend in _BACKENDS.value:
        for page in map(int, _PAGES.value):
            best = figures[f"{backend}, page {page}"] = time_layouts(page, backend)
            ratio = best["scattered"] / best["contiguous"]
            times = ", ".join(f"{name} {ms:.2f} ms" for name, ms in best.items())
            print(f"{backend:10s} page {page:3d}: {times} ({ratio:.2f}x)")
    if _OUTPUT.value:
        info = {"machine": machine.describe(), "jax": jax.__version__, "command": machine.command()}
        shape = {"rows": _ROWS.value, "context": _CONTEXT.value, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM}
        pathlib.Path(_OUTPUT.value).write_text(
            json.dumps({**info, **shape, "adjoining": share, "milliseconds": figures}, indent=1)
        )


if __name__ == "__main__":
    app.run(main)
