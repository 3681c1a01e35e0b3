"""SmolLM2-135M-Instruct on whatever device there is, every option at its default.

`python -m pagedjax.serve --print_config` lists the options with their meanings and ranges.
"""

from pagedjax.flags import default_config_dict


def get_config():
    return default_config_dict()
