"""A handful of users who watch the text appear: short dispatches, few rows, small prefill chunks."""

from pagedjax.flags import default_config_dict


def get_config():
    config = default_config_dict()
    config.scheduler.max_num_seqs = 8
    config.scheduler.max_num_batched_tokens = 128
    config.runner.slice_ms = 30.0
    return config
