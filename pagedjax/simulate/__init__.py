"""A serving system in virtual time, with the allocator that serves: hundreds of configurations in one program.

    from pagedjax.simulate import SimConfig, independent, simulate, sweep

    result = simulate(SimConfig(scheme="paged"), independent(500, rate=2.0, lengths="sharegpt"))
    print(result.summary()["normalized_latency"], result.mean_running(start=60.0))

    rates = (0.5, 1.0, 1.5, 2.0)
    schemes = ("paged", "orca_max", "orca_pow2", "orca_oracle", "faster_transformer")
    runs = [(SimConfig(scheme=s), independent(500, rate)) for s in schemes for rate in rates]
    for (config, _), result in zip(runs, sweep(runs)):
        print(config.scheme, result.normalized_latency, result.waste())

What happens in an iteration, in this order:

1. Requests that ended give their memory back; prompts that are computed are published and forked.
2. Where running requests cannot all take their next token, the last in policy order yields, whole, until they can. It waits
   again; nobody is let in before somebody ends, or somebody arrives whom the policy may prefer.
3. Waiting requests are let in, in policy order, as long as the memory has what they need for the next token (and a share of
   their possible output) beside what the running ones need for the same. The first that does not fit makes the others wait.
   With contiguous reservation: as long as the buddy allocator has a chunk. FasterTransformer: only into an empty batch.
4. All running requests take a token; whole prompts (or chunks of them, within the step's budget) are computed beside.
5. Virtual time advances by what that costs (`pagedjax.simulate.cost`).

Iterations in which nothing but decoding happens are jumped over, up to the next end, arrival, or lack of pages: pages for all
of them are taken at once, and their time and slots are added up in closed form. So the work goes by events, not by tokens.

The paged scheme runs the page verbs of the engine (`pagedjax.pages`), the others those of `pagedjax.pages.baselines`; who goes
first is `pagedjax.policy`, as in the engine. Where this differs from the engine's scheduler: a request takes all pages of its
prompt when it is let in, one that waits for a prefix holds back those behind it, unfilled pages of a prefix are not copied,
a deadline orders but does not end a request, and a tenant is lifted to the least served one that had somebody waiting when
somebody was last let in.

In the authors' artifact FasterTransformer's batches are at most 5 requests for ShareGPT and 14 for Alpaca (OPT-13B): set
`max_running`. Where 14 are to fit, `max_model_len` has to be smaller, as every request reserves that.

Samples of a request (`samples`) all run to its output length, as in the paper's experiments. Beams go by a given pattern of
survivors: `collapsing_beams` shares most, `parallel_beams` least; what a model does lies between.
"""

from pagedjax.simulate.config import SCHEMES, SimConfig, collapsing_beams, parallel_beams
from pagedjax.simulate.cost import PRESETS, Device, ModelSize, Preset, StepCost, calibrated, preset_named
from pagedjax.simulate.lengths import ALPACA, LENGTHS, SHAREGPT, LengthModel
from pagedjax.simulate.result import WASTE, Result
from pagedjax.simulate.run import simulate, sweep
from pagedjax.simulate.workload import Workload, arrivals, conversations, independent, read_trace

__all__ = [
    "ALPACA",
    "LENGTHS",
    "PRESETS",
    "SCHEMES",
    "SHAREGPT",
    "WASTE",
    "Device",
    "LengthModel",
    "ModelSize",
    "Preset",
    "Result",
    "SimConfig",
    "StepCost",
    "Workload",
    "arrivals",
    "calibrated",
    "collapsing_beams",
    "conversations",
    "independent",
    "parallel_beams",
    "preset_named",
    "read_trace",
    "simulate",
    "sweep",
]
