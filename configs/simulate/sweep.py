"""200 runs of 1,000 requests: five schemes, eight rates, five seeds. Every scheme but `paged` goes through one program.

python -m pagedjax.simulate --config=configs/simulate/sweep.py
"""

from pagedjax.simulate.command import default_command_config


def get_config():
    config = default_command_config()
    config.system.preset = "a100-opt-13b"
    config.system.max_running = 64
    config.workload.num_requests = 1000
    config.sweep.schemes = ("paged", "orca_max", "orca_pow2", "orca_oracle", "faster_transformer")
    config.sweep.rates = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
    config.sweep.seeds = (0, 1, 2, 3, 4)
    return config
