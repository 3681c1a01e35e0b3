"""Reads a GGUF file without trusting it: every count, length and offset is checked against the file before it is used.

The layout is the one of the GGUF specification (versions 2 and 3, little-endian): magic, version, counts, key-value
metadata, tensor descriptions, then the tensors' data, aligned. Block formats are decoded by the `gguf` package. Its own
reader is not used: it believes the sizes in the file, and needs a Python object per array element.
"""

from __future__ import annotations

import math
import os
import struct
from typing import Any, NamedTuple, NoReturn

import gguf
import ml_dtypes
import numpy as np

from pagedjax.errors import ModelLoadError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEY_BYTES = 65_535
MAX_DIMS = 8

_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_RAW_FLOATS = {
    gguf.GGMLQuantizationType.F32: np.dtype("<f4"),
    gguf.GGMLQuantizationType.F16: np.dtype("<f2"),
    gguf.GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
_BLOCKS_PER_ROW = 512  # what one step of the decoder works on (16 such rows) stays in the processor's cache


class TensorInfo(NamedTuple):
    """Attributes:
    shape: numpy's order (rows first; the file has it reversed).
    kind: how the numbers are stored.
    offset, num_bytes: where in the file.
    """

    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int
    num_bytes: int


class GGUFFile:
    """An open GGUF file (memory-mapped; tensors are decoded when asked for).

    Attributes:
      metadata: key -> int, float, bool, str, list of str, or numpy array of numbers.
      tensors: name -> TensorInfo.

    Raises:
      ModelLoadError: not a GGUF file, cut off, damaged, or of an unsupported version; says which and what to do.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        try:
            self._bytes = np.memmap(self.path, dtype=np.uint8, mode="r")
        except FileNotFoundError:
            raise ModelLoadError(f"{self.path}: no such file") from None
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{self.path}: cannot be read: {error}") from error
        self._view = memoryview(self._bytes)
        self._at = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._read_header()

    def tensor(self, name: str) -> np.ndarray:
        """The tensor as float32, or as the file stores it where that is float16 or bfloat16 (then a read-only view)."""
        info = self.tensors[name]
        raw = self._bytes[info.offset : info.offset + info.num_bytes]
        if info.kind in _RAW_FLOATS:
            return raw.view(_RAW_FLOATS[info.kind]).reshape(info.shape)
        try:
            return _dequantize(raw, info.kind).reshape(info.shape)
        except NotImplementedError:
            self._fail(
                f"tensor {name!r} is stored as {info.kind.name}, which the gguf package {_gguf_version()} cannot "
                f"decode; take a file of another quantisation, for example Q8_0, Q4_K or F16"
            )

    def _fail(self, reason: str) -> NoReturn:
        raise ModelLoadError(f"{self.path}: {reason}")

    def _take(self, count: int, what: str) -> int:
        """Start of the next `count` bytes, which the file must still have."""
        start, size = self._at, len(self._view)
        if count > size - start:
            self._fail(
                f"the file is cut off or damaged: {what} at byte {start:,} needs {count:,} bytes, "
                f"but the file ends at {size:,}; fetch it again"
            )
        self._at += count
        return start

    def _number(self, code: str, what: str) -> Any:
        return struct.unpack_from(code, self._view, self._take(struct.calcsize(code), what))[0]

    def _string(self, what: str, limit: int | None = None) -> str:
        length = self._number("<Q", what)
        if limit is not None and length > limit:
            self._fail(
                f"the file is damaged: {what} is {length:,} bytes long, at most {limit:,} are allowed; fetch it again"
            )
        start = self._take(length, what)
        try:
            return str(self._view[start : start + length], "utf-8")
        except UnicodeDecodeError as error:
            # Tokens may hold half a character; names may not.
            if limit is None:
                return str(self._view[start : start + length], "utf-8", "replace")
            self._fail(f"the file is damaged: {what} at byte {start:,} is not UTF-8 ({error.reason}); fetch it again")

    def _value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            start = self._take(dtype.itemsize, what)
            return np.frombuffer(self._view, dtype, 1, start)[0].item()
        if kind == _STRING:
            return self._string(what)
        if kind != _ARRAY or depth > 3:
            self._fail(f"the file is damaged: {what} has the unknown type {kind}; fetch it again")
        item, count = self._number("<I", what), self._number("<Q", what)
        if item in _SCALARS:
            dtype = np.dtype(_SCALARS[item])
            return np.frombuffer(self._view, dtype, count, self._take(count * dtype.itemsize, what)).copy()
        if count * 8 > len(self._view) - self._at:  # a string or an array takes at least 8 bytes
            self._take(count * 8, what)
        return [self._value(item, what, depth + 1) for _ in range(count)]

    def _read_header(self) -> None:
        start = self._take(4, "the magic number")
        magic = bytes(self._view[start : start + 4])
        if magic != MAGIC:
            self._fail(f"not a GGUF file: it begins with {magic!r} instead of {MAGIC!r}")
        version = self._number("<I", "the version")
        if version not in VERSIONS:
            if version & 0xFFFF == 0:
                self._fail("a big-endian GGUF file; only little-endian files are supported")
            self._fail(f"GGUF version {version} is not supported, only {' and '.join(map(str, VERSIONS))}")
        num_tensors, num_keys = self._number("<Q", "the tensor count"), self._number("<Q", "the metadata count")
        for _ in range(num_keys):
            key = self._string("a metadata key", MAX_KEY_BYTES)
            if key in self.metadata:
                self._fail(f"the file is damaged: metadata key {key!r} occurs twice; fetch it again")
            self.metadata[key] = self._value(self._number("<I", f"the type of {key!r}"), f"metadata {key!r}")
        if num_tensors * 24 > len(self._view) - self._at:  # a description takes at least 24 bytes
            self._take(num_tensors * 24, "the list of tensors")
        described = [self._describe() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            self._fail(f"the file is damaged: general.alignment must be a power of two, got {alignment!r}")
        base = math.ceil(self._at / alignment) * alignment
        for name, shape, kind, offset, num_bytes in described:
            if name in self.tensors:
                self._fail(f"the file is damaged: tensor {name!r} occurs twice; fetch it again")
            self._at = base + offset
            self._take(num_bytes, f"tensor {name!r}")
            self.tensors[name] = TensorInfo(shape, kind, base + offset, num_bytes)

    def _describe(self) -> tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int, int]:
        name = self._string("a tensor's name", MAX_KEY_BYTES)
        rank = self._number("<I", f"the rank of {name!r}")
        if not 1 <= rank <= MAX_DIMS:
            self._fail(f"the file is damaged: tensor {name!r} has {rank} dimensions; fetch it again")
        shape = tuple(self._number("<Q", f"the shape of {name!r}") for _ in range(rank))[::-1]
        if 0 in shape:
            self._fail(f"the file is damaged: tensor {name!r} has shape {shape}; fetch it again")
        code, offset = self._number("<I", f"the type of {name!r}"), self._number("<Q", f"the offset of {name!r}")
        try:
            kind = gguf.GGMLQuantizationType(code)
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            self._fail(
                f"tensor {name!r} is stored as type number {code}, which the gguf package {_gguf_version()} does not "
                f"know; take a file of another quantisation, for example Q8_0, Q4_K or F16"
            )
        if shape[-1] % block:
            self._fail(
                f"the file is damaged: rows of {shape[-1]} in {name!r} are not a multiple of {block} ({kind.name})"
            )
        return name, shape, kind, offset, math.prod(shape) // block * block_bytes


def _gguf_version() -> str:
    from importlib.metadata import version

    return version("gguf")


def _dequantize(raw: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Blocks u8[n] -> f32 of as many numbers as they hold. NotImplementedError where the package has no decoder."""
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    row = _BLOCKS_PER_ROW * block_bytes
    main = len(raw) // row * row
    parts = [raw[:main].reshape(-1, row)] if main else []
    if main < len(raw):
        parts.append(raw[main:].reshape(1, -1))
    decoded = [gguf.quants.dequantize(part, kind).reshape(-1) for part in parts]
    return decoded[0] if len(decoded) == 1 else np.concatenate(decoded)
