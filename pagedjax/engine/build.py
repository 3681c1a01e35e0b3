"""From a configuration to an engine."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

import jax
from flax import nnx

from pagedjax.config import Config
from pagedjax.engine.allocation import allocation_of, check_allocation
from pagedjax.engine.engine import Engine
from pagedjax.engine.snapshot import check_options, load_engine, saved_options
from pagedjax.engine.snapshot_files import read_description
from pagedjax.errors import ConfigError
from pagedjax.options import with_overrides
from pagedjax.policy import policy_named
from pagedjax.runner import Runner, enable_compilation_cache, make_buckets, sizing
from pagedjax.weights import LoadedModel, load_model

logger = logging.getLogger("pagedjax")


def build_engine(
    config: Config, *, loaded: LoadedModel | None = None, interactive: bool = False, progress: bool = True
) -> Engine:
    """Load the model, lay out the pages, compile.

    Args:
      config: everything there is to choose.
      loaded: a model that is loaded already; else `config.model.path` is.
      interactive: for a server, see `Engine`.
      progress: show bars.

    Where config.snapshot.load names a snapshot, the engine starts with its prefix cache.

    Raises:
      ConfigError, ModelLoadError, SnapshotError: with what to do about it.
    """
    # What is wrong whatever the model is found before minutes of loading.
    policy_named(config.scheduler.policy)
    check_allocation(config)
    enable_compilation_cache(config.runner.compilation_cache)
    snapshot = _snapshot_of(config)
    if snapshot is not None:
        check_options(snapshot, config)
    if snapshot is not None and not config.cache.num_pages:
        config = with_overrides(config, {"cache.num_pages": saved_options(snapshot)["cache.num_pages"]})
    if loaded is None:
        loaded = load_model(config.model.path, sizing.model_dtype(config))
    if config.model.chat_template:
        loaded = with_chat_template(loaded, config.model.chat_template)
    engine = from_loaded(loaded, config, interactive=interactive, progress=progress)
    if snapshot is not None:
        load_engine(engine, snapshot, keep_requests=False)
        logger.info("%s: prefix cache of %d pages", snapshot, engine.stats().pages_cached)
    return engine


def _snapshot_of(config: Config) -> Path | None:
    """The folder to start from; a server that saves on exit has none the first time."""
    if not config.snapshot.load:
        return None
    folder = Path(config.snapshot.load).expanduser()
    if not folder.exists():
        logger.warning("config.snapshot.load: %s does not exist; starting with an empty cache", folder)
        return None
    return folder


def restore_engine(
    folder: str | os.PathLike[str],
    source: LoadedModel | Config,
    *,
    interactive: bool = False,
    progress: bool = True,
) -> Engine:
    """An engine that goes on where a snapshot was taken, requests in flight included: the same tokens follow.

    Args:
      folder: written by `save_engine`.
      source: the model, then the configuration is the snapshot's; or a configuration, whose model is loaded.

    Raises:
      ConfigError, ModelLoadError: as `build_engine`.
      SnapshotError: the snapshot is damaged, or of another model or shape.
    """
    saved = saved_options(folder)
    hash_bits = read_description(folder)["shape"]["hash_bits"]
    if isinstance(source, Config):
        num_pages = source.cache.num_pages or saved["cache.num_pages"]
        config = with_overrides(source, {"cache.num_pages": num_pages, "snapshot.load": ""})
        engine = build_engine(config, interactive=interactive, progress=progress)
    else:
        config = with_overrides(Config(), saved)
        engine = from_loaded(source, config, interactive=interactive, progress=progress, hash_bits=hash_bits)
    load_engine(engine, folder)
    return engine


def with_chat_template(loaded: LoadedModel, path: str) -> LoadedModel:
    """The model with the Jinja template of file `path` in place of its own."""
    if loaded.tokenizer is None:
        raise ConfigError(f"config.model.chat_template: model {loaded.name!r} has no tokenizer to render it for")
    try:
        loaded.tokenizer.chat_template = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"config.model.chat_template: {path} cannot be read: {error}") from error
    return loaded


def from_loaded(
    loaded: LoadedModel, config: Config, *, interactive: bool = False, progress: bool = True, hash_bits: int = 32
) -> Engine:
    """An engine around a model in memory. `hash_bits` is for tests: a short prefix hash forces collisions."""
    weight_bytes = sum(x.nbytes for x in jax.tree.leaves(nnx.state(loaded.model)))
    longest = sizing.max_model_len(config, loaded.spec)
    num_pages = sizing.num_pages(config, loaded.spec, weight_bytes, longest)
    sizing.check_host_pages(config, loaded.spec)
    runner = Runner(
        loaded.model,
        loaded.spec,
        num_pages=num_pages,
        page_size=config.cache.page_size,
        max_rows=config.scheduler.max_num_seqs,
        max_len=longest,
        cache_dtype=sizing.cache_dtype(config),
        buckets=make_buckets(config.runner, config.scheduler),
        buffer_steps=config.runner.max_steps,
        backend=config.runner.attention_backend,
        secret=(secrets.randbits(32), secrets.randbits(32)),
        hash_bits=hash_bits,
        swaps=config.cache.host_pages > 0,
        allocation=allocation_of(config, loaded.spec, num_pages),
    )
    memory = {name: f"{size / 2**20:.0f} MiB" for name, size in runner.memory().items()}
    logger.info(
        "%s: %d pages of %d tokens (%s), weights %s, longest sequence %d tokens",
        loaded.name,
        runner.num_usable_pages,
        runner.page_size,
        memory["kv_pages"],
        memory["weights"],
        runner.max_len,
    )
    engine = Engine(loaded, config, runner, interactive=interactive)
    if config.runner.warm_up:
        engine.warm_up(progress=progress)
    return engine
