"""What the KV memory holds when requests always wait: Kwon et al., figure 2 (OPT-13B, ShareGPT, 4 requests a second, 900 s).

python -m pagedjax.simulate --config=configs/simulate/waste.py
"""

from pagedjax.simulate.command import default_command_config


def get_config():
    config = default_command_config()
    config.system.preset = "a100-opt-13b"
    config.system.max_running = 64
    config.system.horizon = 900.0
    config.workload.num_requests = 3600
    config.workload.rate = 4.0
    config.sweep.schemes = ("paged", "orca_max", "orca_pow2", "orca_oracle")
    return config
