"""When sequences get pages, and which options go with that."""

from __future__ import annotations

from pagedjax.config import Config
from pagedjax.errors import ConfigError
from pagedjax.models import ModelSpec
from pagedjax.pages.capacity import PAGED, Allocation


def check_allocation(config: Config) -> None:
    """What can be known before a model is loaded. ConfigError: an option that would share or move single pages; a chunk that
    is not whole pages."""
    cache = config.cache
    mode = cache.allocation
    if mode == "paged":
        return
    if cache.prefix_caching:
        raise ConfigError(f"config.cache.allocation: {mode} shares nothing; set config.cache.prefix_caching=false")
    if cache.host_pages:
        raise ConfigError(
            f"config.cache.allocation: {mode} moves no pages to the host; config.cache.host_pages must be 0, got "
            f"{cache.host_pages}"
        )
    if mode == "chunked" and cache.chunk_tokens % cache.page_size:
        raise ConfigError(
            f"config.cache.chunk_tokens: must be a multiple of config.cache.page_size = {cache.page_size}, got "
            f"{cache.chunk_tokens}"
        )


def allocation_of(config: Config, spec: ModelSpec, num_pages: int) -> Allocation:
    """When sequences get pages, by `config.cache`.

    Args:
      num_pages: in the pool, the reserved one included.

    Raises:
      ConfigError: as `check_allocation`; a model with windows, whose pages would be given back; a chunk larger than the pool.
    """
    check_allocation(config)
    cache = config.cache
    mode = cache.allocation
    if mode == "paged":
        return PAGED
    if any(spec.groups.windows):
        raise ConfigError(
            f"config.cache.allocation: {mode} gives no page back before its sequence ends; the model's layers see windows of "
            f"{spec.groups.windows} tokens"
        )
    if mode == "contiguous":
        return Allocation(reserve=cache.reserve)
    chunk_pages = cache.chunk_tokens // cache.page_size
    if chunk_pages > num_pages - 1:
        raise ConfigError(
            f"config.cache.chunk_tokens: at most {(num_pages - 1) * cache.page_size}, the {num_pages - 1} pages of the pool, "
            f"got {cache.chunk_tokens}"
        )
    return Allocation(chunk_pages=chunk_pages)
