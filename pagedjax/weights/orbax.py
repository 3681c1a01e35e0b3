"""Our own checkpoints: a folder with a description, the parameters (Orbax) and the tokenizer's files.

checkpoint/
  pagedjax.json     format version, spec, dtype, name, end-of-sequence ids, the parameters' shapes, the files' sizes
  params/           Orbax, one array a parameter, in the model's own (fused, stacked) layout
  tokenizer/        as transformers saves it; absent where the model has none
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pagedjax.errors import ModelLoadError
from pagedjax.models import ModelSpec, get_model
from pagedjax.weights.folder import load_tokenizer, read_json
from pagedjax.weights.loaded import LoadedModel

DESCRIPTION = "pagedjax.json"
FORMAT = 1


def is_checkpoint(folder: Path) -> bool:
    return (folder / DESCRIPTION).is_file()


def save_checkpoint(loaded: LoadedModel, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Writes the model, whole or not at all: the folder appears under its name when everything is in it.

    Args:
      loaded: model, spec, tokenizer.
      folder: to be made; an existing one is an error unless `overwrite`, and then must be a checkpoint or empty.

    Raises:
      FileExistsError: `folder` exists and may not be replaced.
      OSError: the disk is full, or the like.
    """
    target = Path(folder).absolute()
    check_target(target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _write(loaded, temporary)
        temporary.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        os.replace(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def load_checkpoint(folder: Path, dtype: Any, name: str | None = None) -> LoadedModel:
    """Restores what `save_checkpoint` wrote; bitwise equal where `dtype` is the stored one, else rounded to it.

    Raises:
      ModelLoadError: a missing or damaged part, or a checkpoint of a newer format; names it.
    """
    description, spec = read_description(folder)
    try:
        stored_dtype = jnp.dtype(description["dtype"])
        eos_token_ids = tuple(int(i) for i in description["eos_token_ids"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{folder / DESCRIPTION}: damaged ({error!r})") from error
    model_class = get_model(spec.architecture)
    abstract = nnx.eval_shape(lambda: model_class(spec, dtype=stored_dtype, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    abstract_params = nnx.to_pure_dict(state)
    _check_content(folder / "params", description, _shapes(abstract_params))
    params = _restore(folder / "params", abstract_params)
    params = jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), params)
    nnx.replace_by_pure_dict(state, params)
    tokenizer = tokenizer_of(folder)
    model = nnx.merge(graphdef, state)
    return LoadedModel(model, spec, tokenizer, name or str(description.get("name") or folder.name), eos_token_ids)


def read_description(folder: Path) -> tuple[dict[str, Any], ModelSpec]:
    """A checkpoint's description and what the model is; no weight is read.

    Raises:
      ModelLoadError: missing or damaged, or of a newer format.
    """
    description = read_json(folder / DESCRIPTION)
    if description.get("format") != FORMAT:
        raise ModelLoadError(
            f"{folder}: a checkpoint of format {description.get('format')!r}; this version of pagedjax reads {FORMAT}"
        )
    try:
        return description, _spec_from_json(description["spec"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{folder / DESCRIPTION}: damaged ({error!r})") from error


def tokenizer_of(folder: Path) -> Any:
    """The tokenizer in a checkpoint, None where there is none."""
    return load_tokenizer(folder / "tokenizer") if (folder / "tokenizer").is_dir() else None


def check_target(target: Path, overwrite: bool) -> None:
    """FileExistsError where `save_checkpoint` would not write; worth knowing before a long conversion."""
    if not target.exists():
        return
    if not target.is_dir():
        raise FileExistsError(f"{target} exists and is not a folder")
    empty = not any(target.iterdir())
    if empty or (overwrite and is_checkpoint(target)):
        return
    raise FileExistsError(
        f"{target} exists and is not a pagedjax checkpoint; it is not overwritten"
        if overwrite
        else f"{target} exists; choose another folder, or allow overwriting"
    )


def _write(loaded: LoadedModel, folder: Path) -> None:
    import orbax.checkpoint as ocp

    _, state = nnx.split(loaded.model)
    params = nnx.to_pure_dict(state)
    dtypes = {str(x.dtype) for x in jax.tree.leaves(params)}
    if len(dtypes) != 1:
        raise ValueError(f"all parameters must have one dtype, got {sorted(dtypes)}")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "params", params)
        checkpointer.wait_until_finished()
    if loaded.tokenizer is not None:
        loaded.tokenizer.save_pretrained(os.fspath(folder / "tokenizer"))
    description = {
        "format": FORMAT,
        "name": loaded.name,
        "dtype": dtypes.pop(),
        "eos_token_ids": list(loaded.eos_token_ids),
        "spec": _spec_to_json(loaded.spec),
        "shapes": _shapes(params),
        "files": _sizes(folder / "params"),
    }
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def _sizes(folder: Path) -> dict[str, int]:
    return {p.relative_to(folder).as_posix(): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}


def _shapes(params: Any) -> dict[str, list[int]]:
    return {jax.tree_util.keystr(path): list(x.shape) for path, x in jax.tree_util.tree_leaves_with_path(params)}


def _check_content(folder: Path, description: Mapping[str, Any], shapes: Mapping[str, list[int]]) -> None:
    """Finds what is missing or cut short before Orbax does, whose readers fail noisily in threads of their own."""
    files, stored = description.get("files"), description.get("shapes")
    if not isinstance(files, dict) or not isinstance(stored, dict):
        raise ModelLoadError(f"{folder.parent / DESCRIPTION}: damaged (no list of files or shapes)")
    for name in {**stored, **shapes}:
        if stored.get(name) != shapes.get(name):
            raise ModelLoadError(
                f"{folder}: cannot be restored: parameter {name} has shape {stored.get(name)}, the model's is "
                f"{shapes.get(name)}; convert it again"
            )
    found = _sizes(folder)
    for name, size in files.items():
        if found.get(name) != size:
            state = "is missing" if name not in found else f"has {found[name]:,} bytes instead of {size:,}"
            raise ModelLoadError(f"{folder}: cannot be restored: {name} {state}; copy or convert it again")


def _restore(folder: Path, abstract: Any) -> Any:
    import orbax.checkpoint as ocp

    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(folder.absolute(), target)
    except Exception as error:  # Orbax and TensorStore raise bare exceptions of many kinds
        raise ModelLoadError(
            f"{folder}: cannot be restored: {error}\nIt is damaged or incomplete; convert it again"
        ) from error


def _spec_to_json(spec: ModelSpec) -> dict[str, Any]:
    plain = lambda value: dict(value) if isinstance(value, Mapping) else value  # noqa: E731
    return {field.name: plain(getattr(spec, field.name)) for field in dataclasses.fields(spec)}


def _spec_from_json(values: Mapping[str, Any]) -> ModelSpec:
    known = {field.name for field in dataclasses.fields(ModelSpec)}
    if unknown := set(values) - known:
        raise ValueError(f"unknown fields {sorted(unknown)}")
    arguments: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
    return ModelSpec(**arguments)
