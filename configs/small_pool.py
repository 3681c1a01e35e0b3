"""A pool so small that a few long answers exhaust it: preemption and eviction to watch in /metrics."""

from pagedjax.flags import default_config_dict


def get_config():
    config = default_config_dict()
    config.model.max_model_len = 1024
    config.cache.num_pages = 129  # 128 usable pages of 16 tokens: two sequences of full length
    config.scheduler.max_num_seqs = 8
    config.scheduler.growth_share = 0.0  # admit at once, preempt when it turns out to be too many
    config.runner.check_every = 16
    return config
