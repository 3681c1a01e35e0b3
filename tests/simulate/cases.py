"""Small workloads and systems that the simulator's tests share, so that programs are compiled once."""

import functools

import numpy as np

from pagedjax.simulate import SimConfig, Workload
from tests.oracles.simulate_oracle import SimulateOracle

Q = 24
SMALL = dict(page_size=4, num_pages=24, max_model_len=48, max_running=8, max_num_batched_tokens=40)
COSTS = dict(attention_slowdown=1.25, page_seconds=2e-5, moved_page_seconds=1e-4)
PAGED = functools.partial(SimConfig, **SMALL, **COSTS)


def workload(seed, *, alike=False):
    """Requests that arrive faster than they are served; `alike`: with prefixes and texts in common."""
    rng = np.random.default_rng(seed)
    prompt, output = rng.integers(1, 16, Q), rng.integers(1, 17, Q)
    prompt[0], output[0] = 24, 16  # all workloads have the same longest request, and so the same shapes
    prefix_tokens, stream = np.zeros(Q, int), np.arange(Q)
    if alike:
        prefix_tokens, stream = rng.choice([0, 8, 9], Q), rng.integers(0, 4, Q)
        prompt[1:] += prefix_tokens[1:]
    return Workload(
        arrival=np.cumsum(rng.exponential(0.03, Q)),
        prompt=prompt,
        output=output,
        prefix=rng.integers(0, 2, Q),
        prefix_tokens=prefix_tokens,
        stream=stream,
        priority=rng.integers(0, 3, Q),
        tenant=np.append(rng.integers(0, 3, Q - 1), 2),
        deadline=rng.choice([0.5, 1.0, np.inf], Q),
    )


def oracle_of(config, load, longest):
    """The oracle after the whole run, with as many slots and pages a row as the program has."""
    slots = min(config.max_running, config.total_pages, Q)
    tokens = config.max_model_len if config.family == "buddy" else longest
    return SimulateOracle(config, load, slots, -(-tokens // config.page_size)).run()
