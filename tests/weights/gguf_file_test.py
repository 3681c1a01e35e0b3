"""The GGUF reader: what it decodes, and that no damaged file gets further than a ModelLoadError."""

from __future__ import annotations

import functools
import struct
import tempfile
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.errors import ModelLoadError
from pagedjax.weights import load_model
from pagedjax.weights.gguf_file import GGUFFile
from tests.models.harness import random_checkpoint
from tests.weights.files import block_spec, encoded, write_gguf

# Largest error of a number in a block, in units of the block's largest magnitude.
QUANTISED = {
    Kind.BF16: 1 / 256,
    Kind.Q8_0: 1 / 200,
    Kind.Q4_0: 1 / 7,
    Kind.Q4_1: 1 / 7,
    Kind.Q5_0: 1 / 15,
    Kind.Q5_1: 1 / 15,
}
DECODED_ONLY = (Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS, Kind.MXFP4)


def write_tensor(path, raw: np.ndarray, kind: Kind, name: str = "x"):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor(name, raw, raw_dtype=None if kind in (Kind.F32, Kind.F16) else kind)
    for part in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{part}_to_file")()
    writer.close()
    return path


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, *QUANTISED])
def test_decodes_what_was_written(tmp_path, kind):
    x = np.random.default_rng(0).normal(size=(7, 192)).astype(np.float32)
    got = GGUFFile(write_tensor(tmp_path / "x.gguf", encoded(x, kind), kind)).tensor("x")
    assert got.shape == x.shape
    if kind == Kind.BF16:
        np.testing.assert_array_equal(got, x.astype(ml_dtypes.bfloat16))
    bound = QUANTISED.get(kind, 1e-3 if kind == Kind.F16 else 0.0)
    largest = np.abs(x).reshape(7, -1, 32).max(-1, keepdims=True)
    assert np.all(np.abs(got.astype(np.float32) - x).reshape(7, -1, 32) <= bound * largest)


@pytest.mark.parametrize("kind", DECODED_ONLY)
@pytest.mark.parametrize("num_blocks", [1, 3, 513])
def test_decodes_in_pieces_as_in_one(tmp_path, kind, num_blocks):
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(1).integers(0, 256, (1, num_blocks * block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        got = GGUFFile(write_tensor(tmp_path / "x.gguf", raw, kind)).tensor("x")
        want = gguf.quants.dequantize(raw, kind)
    assert got.shape == (1, num_blocks * block)
    np.testing.assert_array_equal(got, want)


def test_metadata_as_the_gguf_package_reads_it(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", block_spec(), random_checkpoint(block_spec()))
    file, reader = GGUFFile(path), gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert set(file.metadata) == set(fields)
    for key, value in fields.items():
        got = file.metadata[key]
        assert (got.tolist() if isinstance(got, np.ndarray) else got) == value
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]


@functools.cache
def good_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = write_gguf(Path(folder) / "m.gguf", block_spec(), random_checkpoint(block_spec()), kind=Kind.Q8_0)
        return path.read_bytes()


def read_all(path) -> None:
    file = GGUFFile(path)
    for name in file.tensors:
        file.tensor(name)


@pytest.mark.parametrize("keep", [0, 3, 4, 8, 23, 24, 100, 5000, 0.3, 0.6, 0.999])
def test_a_file_cut_off_is_refused(tmp_path, keep):
    good = good_file()
    size = keep if isinstance(keep, int) else int(keep * len(good))
    path = tmp_path / "cut.gguf"
    path.write_bytes(good[:size])
    with pytest.raises(ModelLoadError, match=r"cut\.gguf.*(cut off|cannot be read)"):
        read_all(path)


@settings(max_examples=60, deadline=None)
@given(
    place=st.integers(0, 14_000),  # the header; what follows are the tensors' numbers, any of which is valid
    patch=st.sampled_from([b"\xff" * 8, b"\x00" * 8, b"\xff", b"\x7f", struct.pack("<Q", 2**61)]),
)
def test_a_damaged_file_is_read_or_refused_but_never_more(tmp_path_factory, place, patch):
    good = good_file()
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(good[:place] + patch + good[place + len(patch) :])
    try:
        load_model(path, "float32")
    except ModelLoadError as error:
        named = "damaged.gguf" in str(error)
        assert named, error  # noqa: PT017 - most patches are refused, some hit what does not matter


def header(num_tensors=0, num_keys=0, body=b"", version=3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + body


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor(name: str, shape, kind=0, offset=0) -> bytes:
    return text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}QIQ", *shape, kind, offset)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
        (header(version=9), "version 9"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "big-endian"),
        (header(num_tensors=2**62), "cut off or damaged"),
        (header(num_keys=2**62), "cut off or damaged"),
        (header(0, 1, text("k") + struct.pack("<IIQ", 9, 0, 2**62)), "needs 4,611,686,018,427,387,904 bytes"),
        (header(0, 1, text("k") + struct.pack("<IIQ", 9, 8, 2**61)), "cut off or damaged"),
        (header(0, 1, text("k") + struct.pack("<I", 77)), "unknown type 77"),
        (header(0, 1, text("k") + struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 9, 1) * 9), "unknown type"),
        (header(0, 1, struct.pack("<Q", 2**40)), "at most 65,535"),
        (header(0, 2, 2 * (text("k") + struct.pack("<II", 4, 1))), "occurs twice"),
        (header(0, 1, text("general.alignment") + struct.pack("<II", 4, 3)), "power of two"),
        (header(1, 0, tensor("x", [2**33, 2**33])), "cut off or damaged"),
        (header(1, 0, tensor("x", [4], offset=2**63)), "cut off or damaged"),
        (header(1, 0, tensor("x", [0])), "shape"),
        (header(1, 0, tensor("x", [1] * 9)), "9 dimensions"),
        (header(1, 0, tensor("x", [32], kind=5)), "type number 5"),
        (header(1, 0, tensor("x", [33], kind=8)), "multiple of 32"),
        (header(2, 0, 2 * tensor("x", [4]) + bytes(99)), "occurs twice"),
    ],
)
def test_sizes_in_the_file_are_not_believed(tmp_path, content, message):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=message):
        read_all(path)


def test_a_type_without_a_decoder_is_named(tmp_path):
    raw = np.zeros((1, gguf.GGML_QUANT_SIZES[Kind.Q8_K][1]), np.uint8)
    file = GGUFFile(write_tensor(tmp_path / "x.gguf", raw, Kind.Q8_K))
    with pytest.raises(ModelLoadError, match=r"'x' is stored as Q8_K.*another quantisation"):
        file.tensor("x")
