"""Folders of safetensors: one file, shards, spare and missing tensors, pickles, damage."""

from __future__ import annotations

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from pagedjax.errors import ModelLoadError
from pagedjax.models import Llama
from pagedjax.weights import load_model
from tests.models.harness import PagedRun, random_checkpoint
from tests.weights.files import SPECIAL, block_spec, hf_tokenizer, trained_tokenizer, write_folder, write_gguf
from tests.weights.gguf_test import same_parameters


@pytest.mark.parametrize("shards", [1, 3])
def test_single_and_sharded(tmp_path, shards):
    spec = block_spec(architecture="MistralForCausalLM")
    tensors = random_checkpoint(spec)
    folder = write_folder(
        tmp_path / "my-model", spec, tensors, shards=shards, tokenizer=hf_tokenizer(), config={"sliding_window": None}
    )
    loaded = load_model(folder, "float32")
    assert loaded.spec == spec
    assert same_parameters(loaded.model, Llama.load(spec, tensors, "float32"))
    assert (loaded.name, loaded.eos_token_ids) == ("my-model", (2,))
    assert loaded.tokenizer.encode("a b 12") == hf_tokenizer().encode("a b 12")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bfloat16_files_in_any_dtype(tmp_path, dtype):
    spec = block_spec()
    tensors = {name: x.astype(ml_dtypes.bfloat16) for name, x in random_checkpoint(spec).items()}
    loaded = load_model(str(write_folder(tmp_path / "m", spec, tensors)), dtype)
    assert loaded.model.embedding[...].dtype == dtype
    assert loaded.tokenizer is None
    np.testing.assert_array_equal(
        np.asarray(loaded.model.embedding[...], np.float32),
        tensors["model.embed_tokens.weight"].astype(dtype).astype(np.float32),
    )


@pytest.mark.parametrize("spare", [False, True])
def test_tied_head_is_the_embedding(tmp_path, spare):
    spec = block_spec(tie_word_embeddings=True)
    tensors = random_checkpoint(spec)
    if spare:
        tensors["lm_head.weight"] = np.full_like(tensors["model.embed_tokens.weight"], 1e6)
    model = load_model(write_folder(tmp_path / "m", spec, tensors), "float32").model
    hidden = np.random.default_rng(0).normal(size=(3, spec.hidden_size)).astype(np.float32)
    want = hidden @ tensors["model.embed_tokens.weight"].T
    np.testing.assert_allclose(np.asarray(model.logits(hidden)), want, rtol=1e-4, atol=1e-4)


def greedy(run: PagedRun, model, prompt: list[int], count: int) -> list[int]:
    """`run` brings the compiled step, `model` the weights."""
    tokens: list[int] = []
    run.params, run.lengths = nnx.state(model), np.zeros(1, np.int32)
    logits = run.feed([prompt])[0][-1]
    for _ in range(count):
        tokens.append(int(logits.argmax()))
        logits = run.feed([tokens[-1:]])[0][-1]
    return tokens


def test_gguf_and_safetensors_agree_on_ids_and_text(tmp_path):
    from gguf import GGMLQuantizationType

    spec = block_spec(tie_word_embeddings=True)
    tensors = {name: x.astype(np.float16) for name, x in random_checkpoint(spec).items()}
    one = load_model(write_folder(tmp_path / "a", spec, tensors, tokenizer=hf_tokenizer(add_bos=True)), "float32")
    keys = {"tokenizer.ggml.add_bos_token": True}
    path = write_gguf(tmp_path / "b.gguf", spec, tensors, kind=GGMLQuantizationType.F16, keys=keys)
    two = load_model(path, "float32")
    assert (one.spec, one.eos_token_ids, one.adds_bos) == (two.spec, two.eos_token_ids, two.adds_bos)
    texts = [license_line for license_line in _lines() if license_line][:20]
    assert len(texts) == 20
    for text in texts:
        ids = one.encode(text)
        assert ids == two.encode(text)
        assert ids[0] == trained_tokenizer().token_to_id(SPECIAL[0])
    chat = [{"role": "user", "content": texts[0]}]
    assert one.encode_chat(chat) == two.encode_chat(chat)
    prompt = one.encode(texts[1])[:20]
    run = PagedRun(one.model, num_rows=1)
    tokens = greedy(run, one.model, prompt, 16)
    assert tokens == greedy(run, two.model, prompt, 16)
    assert one.tokenizer.decode(tokens) == two.tokenizer.decode(tokens)


def _lines():
    from tests.goldens.prompts import license_text

    return [" naïve café 1234 日本語 👩\u200d🚀", *license_text().splitlines()]


def test_end_of_sequence_ids_come_from_every_file(tmp_path):
    spec = block_spec()
    folder = write_folder(tmp_path / "m", spec, random_checkpoint(spec), tokenizer=hf_tokenizer())
    assert load_model(folder, "float32").eos_token_ids == (2,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 0]}))
    assert load_model(folder, "float32").eos_token_ids == (7, 0, 2)


def folder_with(tmp_path, files=(), config=None, tensors=None):
    spec = block_spec()
    folder = write_folder(tmp_path / "m", spec, tensors or random_checkpoint(spec), config=config, shards=2)
    for name, content in dict(files).items():
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content)
    return folder


SHARD = "model-00001-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("files", "config", "message"),
    [
        ({"config.json": b"{"}, None, r"config\.json: not valid JSON"),
        ({"config.json": b"[" * 100_000}, None, r"config\.json: not valid JSON"),
        ({"config.json": b"[]"}, None, "must be a JSON object, got list"),
        (
            {},
            {"architectures": ["BloomForCausalLM"]},
            "unsupported architecture: BloomForCausalLM; supported are Llama",
        ),
        ({}, {"quantization_config": {"quant_method": "awq"}}, "quantised by 'awq'"),
        ({}, {"num_hidden_layers": 3}, r"no tensor 'model\.layers\.2\.\S+'"),
        ({}, {"hidden_size": 128}, r"must have shape"),
        ({SHARD: None}, None, "this shard is missing"),
        ({SHARD: b""}, None, "damaged or cut off"),
        ({SHARD: b"\xff" * 100}, None, "damaged or cut off"),
        ({SHARD: b"\x02\0\0\0\0\0\0\0{}"}, None, "no tensor"),
        ({INDEX: b"{}"}, None, "not an index of safetensors shards"),
        ({INDEX: json.dumps({"weight_map": {"x": "../../m.safetensors"}}).encode()}, None, "same folder"),
        ({"tokenizer.json": b"{}"}, None, "the tokenizer cannot be loaded"),
    ],
)
def test_refused_folders(tmp_path, files, config, message):
    folder = folder_with(tmp_path, files, config)
    with pytest.raises(ModelLoadError, match=message) as raised:
        load_model(folder, "float32")
    assert str(folder) in str(raised.value)


def test_a_shard_cut_off(tmp_path):
    folder = folder_with(tmp_path)
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=r"model-00001.*damaged or cut off"):
        load_model(folder, "float32")


def test_pickles_are_refused_by_name(tmp_path):
    folder = folder_with(tmp_path)
    for file in [*folder.glob("*.safetensors"), folder / INDEX]:
        file.unlink()
    with pytest.raises(ModelLoadError, match=r"no \*\.safetensors files"):
        load_model(folder, "float32")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    for path in (folder, folder / "pytorch_model.bin"):
        with pytest.raises(ModelLoadError, match=r"a pickle, which can run any code"):
            load_model(path, "float32")


def test_weights_that_are_not_numbers_of_a_model(tmp_path):
    spec = block_spec()
    tensors = random_checkpoint(spec)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int32)
    with pytest.raises(ModelLoadError, match=r"'model\.norm\.weight' must be floating point, got int32"):
        load_model(write_folder(tmp_path / "m", spec, tensors), "float32")
    write_folder(tmp_path / "n", spec, random_checkpoint(spec), shards=2)
    safetensors.numpy.save_file({"model.norm.weight": np.ones(64, np.float32)}, tmp_path / "n" / SHARD)
    with pytest.raises(ModelLoadError, match=r"'model\.norm\.weight' is also in|no tensor"):
        load_model(tmp_path / "n", "float32")


def test_transformers_gives_no_advice_about_torch():
    code = (
        "from pagedjax.weights.transformers_quietly import transformers; import os; transformers().AutoTokenizer;"
        "assert 'TRANSFORMERS_NO_ADVISORY_WARNINGS' not in os.environ"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
