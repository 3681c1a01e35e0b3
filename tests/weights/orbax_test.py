"""Checkpoints of our own: bitwise round trips, damage, overwriting, and the command that makes them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx

from pagedjax.errors import ModelLoadError
from pagedjax.models import Llama
from pagedjax.weights import LoadedModel, load_model, save_checkpoint
from tests.models.harness import random_checkpoint
from tests.weights.files import block_spec, hf_tokenizer, write_folder
from tests.weights.gguf_test import same_parameters

SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def model_in_memory(dtype="float32", tokenizer=True, **changes) -> LoadedModel:
    spec = block_spec(**changes)
    model = Llama.load(spec, random_checkpoint(spec), dtype)
    return LoadedModel(model, spec, hf_tokenizer(add_bos=True) if tokenizer else None, "tiny", (2, 0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True, "attention_bias": True, "rope_scaling": SCALING}]
)
def test_round_trip_is_bitwise(tmp_path, dtype, changes):
    saved = model_in_memory(dtype, **changes)
    save_checkpoint(saved, tmp_path / "ckpt")
    restored = load_model(str(tmp_path / "ckpt"), dtype)
    assert same_parameters(saved.model, restored.model)
    assert (restored.spec, hash(restored.spec)) == (saved.spec, hash(saved.spec))
    assert (restored.name, restored.eos_token_ids, restored.adds_bos) == ("tiny", (2, 0), True)
    chat = [{"role": "user", "content": "naïve 12  👩\u200d🚀"}]
    assert restored.encode_chat(chat) == saved.encode_chat(chat)
    assert nnx.graphdef(restored.model) == nnx.graphdef(saved.model)


def test_restoring_in_another_dtype_rounds(tmp_path):
    saved = model_in_memory(tokenizer=False)
    save_checkpoint(saved, tmp_path / "ckpt")
    restored = load_model(tmp_path / "ckpt", "bfloat16")
    rounded = Llama.load(saved.spec, random_checkpoint(saved.spec), "bfloat16")
    assert same_parameters(restored.model, rounded)
    assert restored.tokenizer is None


def test_existing_folders_are_kept_unless_told(tmp_path):
    saved = model_in_memory(tokenizer=False)
    (tmp_path / "empty").mkdir()
    save_checkpoint(saved, tmp_path / "empty")
    with pytest.raises(FileExistsError, match="choose another folder"):
        save_checkpoint(saved, tmp_path / "empty")
    save_checkpoint(saved, tmp_path / "empty", overwrite=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(FileExistsError, match="not a pagedjax checkpoint"):
        save_checkpoint(saved, tmp_path / "mine", overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["empty", "mine"]  # nothing half-written is left


def test_damage_is_named(tmp_path):
    save_checkpoint(model_in_memory(tokenizer=False), tmp_path / "good")

    def broken(change) -> str:
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        change(tmp_path / "bad")
        with pytest.raises(ModelLoadError) as raised:
            load_model(tmp_path / "bad", "float32")
        return str(raised.value)

    def edit(**changes):
        def change(folder):
            description = json.loads((folder / "pagedjax.json").read_text())
            (folder / "pagedjax.json").write_text(json.dumps({**description, **changes}))

        return change

    def cut(folder):
        largest = max((p for p in (folder / "params").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])

    assert "cannot be restored" in broken(lambda folder: shutil.rmtree(folder / "params"))
    assert "cannot be restored" in broken(cut)
    assert "not valid JSON" in broken(lambda folder: (folder / "pagedjax.json").write_text("{"))
    assert "format 2; this version of pagedjax reads 1" in broken(edit(format=2))
    assert "damaged" in broken(edit(spec={"colour": "red"}))
    spec = json.loads((tmp_path / "good" / "pagedjax.json").read_text())["spec"]
    assert "cannot be restored" in broken(edit(spec={**spec, "num_layers": 3}))
    assert "unsupported architecture" in broken(edit(spec={**spec, "architecture": "Bloom"}))


def test_the_command(tmp_path):
    spec = block_spec()
    source = write_folder(tmp_path / "source", spec, random_checkpoint(spec), tokenizer=hf_tokenizer())
    command = [sys.executable, "-m", "pagedjax.convert", f"--model={source}", f"--output={tmp_path / 'out'}"]
    done = subprocess.run([*command, "--dtype=float32"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "wrote source to" in done.stdout
    assert same_parameters(load_model(tmp_path / "out", "float32").model, load_model(source, "float32").model)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "choose another folder" in done.stderr) == (1, True)
    assert "Traceback" not in done.stderr


def test_restored_arrays_are_ordinary(tmp_path):
    save_checkpoint(model_in_memory(tokenizer=False), tmp_path / "ckpt")
    model = load_model(tmp_path / "ckpt", "float32").model
    for array in jax.tree.leaves(nnx.state(model)):
        assert isinstance(array, jax.Array)
        assert array.committed is False or len(array.devices()) == 1
        assert np.isfinite(np.asarray(array)).all()
