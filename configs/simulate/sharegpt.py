"""OPT-13B on an A100, requests as long as ShareGPT's: all ways to hand out memory, over the rate (Kwon et al., figure 12a).

python -m pagedjax.simulate --config=configs/simulate/sharegpt.py
"""

from pagedjax.simulate.command import default_command_config


def get_config():
    config = default_command_config()
    config.system.preset = "a100-opt-13b"
    config.system.max_running = 64
    config.workload.num_requests = 500
    config.sweep.schemes = ("paged", "orca_max", "orca_pow2", "orca_oracle")
    config.sweep.rates = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
    return config
