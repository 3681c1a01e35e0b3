"""What to use where the configuration says "choose for me": precision, number of pages, longest sequence."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp
from pagedjax_kernels import init_cache

from pagedjax.config import Config
from pagedjax.errors import ConfigError
from pagedjax.models import ModelSpec
from pagedjax.pages.capacity import Footprint, activation_bytes

GIB = 2**30
MAX_CPU_POOL = 2 * GIB
"""On a CPU the pool shares the memory of everything else that runs there."""
FALLBACK_MEMORY = 8 * GIB
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16, "int8": jnp.int8}


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def _old_jax() -> bool:
    """JAX 0.10 on a CPU converts a whole bfloat16 cache at every write."""
    major, minor = (int(part) for part in jax.__version__.split(".")[:2])
    return (major, minor) < (0, 11)


def _cpu_likes_bfloat16() -> bool:
    info = Path("/proc/cpuinfo")
    flags = info.read_text(errors="replace") if info.exists() else ""
    return "amx_bf16" in flags or "avx512_bf16" in flags


def model_dtype(config: Config) -> jnp.dtype:
    """Of weights and activations."""
    if config.model.dtype != "auto":
        return jnp.dtype(DTYPES[config.model.dtype])
    if _on_cpu() and (_old_jax() or not _cpu_likes_bfloat16()):
        return jnp.dtype(jnp.float32)
    return jnp.dtype(jnp.bfloat16)


def cache_dtype(config: Config) -> jnp.dtype:
    """Of the KV pages."""
    name = config.cache.dtype
    if name == "auto":
        dtype = model_dtype(config)
        return jnp.dtype(jnp.float32) if dtype == jnp.bfloat16 and _on_cpu() and _old_jax() else dtype
    return jnp.dtype(jnp.float8_e4m3fn if name == "float8_e4m3fn" else DTYPES[name])


def device_memory() -> int:
    """Bytes of the default device that can be used; of the machine, on a CPU."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return host_memory()


def host_memory() -> int:
    """Bytes of the machine's memory."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return FALLBACK_MEMORY


def num_pages(config: Config, spec: ModelSpec, weight_bytes: int, max_len: int) -> int:
    """Physical pages N, the reserved one included: configured, or what memory_fraction leaves beside the weights.

    Never more than all rows can fill at their longest.
    """
    num_groups = len(spec.groups.windows)
    if config.cache.num_pages:
        if config.cache.num_pages < 1 + num_groups:
            each = f", and {num_groups} layer groups take pages of their own" if num_groups > 1 else ""
            raise ConfigError(
                f"config.cache.num_pages: must be at least {1 + num_groups} (one page is reserved{each}), "
                f"got {config.cache.num_pages}"
            )
        most = max(device_memory() - weight_bytes, 0) // _page_bytes(config, spec)
        if config.cache.num_pages > most:
            raise ConfigError(
                f"config.cache.num_pages: {config.cache.num_pages} pages do not fit: at most {most} in "
                f"{device_memory() / GIB:.1f} GiB beside {weight_bytes / GIB:.1f} GiB of weights"
            )
        return config.cache.num_pages
    page = _page_bytes(config, spec)
    activations = activation_bytes(
        num_tokens=config.scheduler.max_num_batched_tokens,
        num_rows=config.scheduler.max_num_seqs,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        vocab_size=spec.vocab_size,
    )
    room = int(device_memory() * config.cache.memory_fraction) - weight_bytes - activations
    if _on_cpu():
        room = min(room, MAX_CPU_POOL)
    footprint = Footprint(config.cache.page_size, spec.groups.windows)
    useful = config.scheduler.max_num_seqs * sum(footprint.most(max_len, config.scheduler.max_num_batched_tokens))
    pages = min(room // page, useful)
    if pages < num_groups:
        raise ConfigError(
            f"config.cache.memory_fraction: {config.cache.memory_fraction} of {device_memory() / GIB:.1f} GiB leaves no room "
            f"for pages beside {weight_bytes / GIB:.1f} GiB of weights; raise it, or take a smaller model or dtype"
        )
    return pages + 1


def check_host_pages(config: Config, spec: ModelSpec) -> None:
    """Raises ConfigError where the host pool is larger than the machine's memory."""
    memory, page = host_memory(), _page_bytes(config, spec)
    if config.cache.host_pages * page > memory:
        raise ConfigError(
            f"config.cache.host_pages: {config.cache.host_pages} pages do not fit: at most {memory // page} in "
            f"{memory / GIB:.1f} GiB"
        )


def _page_bytes(config: Config, spec: ModelSpec) -> int:
    """Bytes of one page over its group's layers as it will be allocated: padded head dims and scales included."""
    shape = (spec.groups.num_places, 1, config.cache.page_size, spec.num_kv_heads, spec.head_dim, cache_dtype(config))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(lambda: init_cache(*shape))))


def max_model_len(config: Config, spec: ModelSpec) -> int:
    """Longest sequence, before the pool's size caps it."""
    asked, most = config.model.max_model_len, spec.max_position_embeddings
    if asked > most:
        raise ConfigError(f"config.model.max_model_len: the model's context is {most} tokens, got {asked}")
    return asked or most
