"""Full precision for weights, activations and pages: outputs that can be compared token for token."""

from pagedjax.flags import default_config_dict


def get_config():
    config = default_config_dict()
    config.model.dtype = "float32"
    config.cache.dtype = "float32"
    return config
