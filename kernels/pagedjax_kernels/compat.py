"""What differs between the JAX versions we support (0.10.2 to 0.12). Everything else in the package is version-free."""

from __future__ import annotations

import jax

JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3])


def storage_dtype(dtype: str, platform: str) -> str:
    """What pages of `dtype` are kept as, so that writing a few of them leaves the rest alone.

    XLA's CPU backend widens the whole operand of a float8 scatter or slice update (JAX 0.10: a bfloat16 one, too) and
    narrows it again, copying the pool twice at every write. Unsigned integers with the same bits are updated in
    place; only what is read or written is reinterpreted.
    """
    if platform == "cpu" and dtype == "float8_e4m3fn":
        return "uint8"
    if platform == "cpu" and dtype == "bfloat16" and JAX_VERSION < (0, 12):
        return "uint16"
    return dtype
