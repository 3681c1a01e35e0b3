"""From a model and a device's memory to pages, tokens and concurrent requests. Exact integers; nothing is allocated."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pagedjax_kernels.cache import QUANTIZED_DTYPES, padded_head_dim

from pagedjax.errors import ConfigError
from pagedjax.models.shapes import ModelShape
from pagedjax.pages import schemes
from pagedjax.pages.capacity import (
    Footprint,
    activation_bytes,
    bytes_per_page,
    bytes_per_token,
    cache_memory,
    max_concurrent_requests,
    pages_that_fit,
)
from pagedjax.pages.schemes import RequestShape

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}
_SCALE_BYTES = 4
"""Of the float32 scale that int8 and float8 pages keep per token and head, for K and for V."""

SCHEMES = {
    "contiguous_max": "contiguous, reserved for the longest sequence",
    "contiguous_pow2": "contiguous, reserved for the output rounded up to a power of two",
    "contiguous_oracle": "contiguous, reserved for the true length",
    "chunks": "fixed-size chunks, taken as they fill; all requests at full length",
    "paged": "pages, taken as they fill; all requests at full length",
    "paged_average": "pages, requests evenly spread over their outputs",
}


@dataclasses.dataclass(frozen=True)
class Question:
    """What is asked. Sizes in bytes are those of one device.

    Attributes:
      shape: the model.
      device_bytes: memory of one device.
      cache_bytes: memory for pages on one device; 0: what the fraction leaves beside weights and activations.
      weight_dtype, kv_dtype: keys of DTYPE_BYTES.
      devices: tensor parallelism: KV heads, MLP columns and vocabulary are dealt out; where there are more devices than
        KV heads, heads are held more than once.
      max_len: the longest sequence that is allowed, for the scheme that reserves it.
      lengths: request shapes to answer for.
      shared_prefix: tokens that all prompts begin with, held once by pages.
      chunk_tokens: of the scheme with fixed-size chunks.
      step_tokens, step_rows: most tokens and rows in a step, for the activations and for what windows hold.
    """

    shape: ModelShape
    device_bytes: int
    weight_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    page_size: int = 16
    fraction: float = 0.85
    devices: int = 1
    cache_bytes: int = 0
    max_len: int = 0
    lengths: tuple[RequestShape, ...] = ()
    shared_prefix: int = 0
    chunk_tokens: int = 256
    step_tokens: int = 512
    step_rows: int = 64


@dataclasses.dataclass(frozen=True)
class Line:
    """The answer for one request shape.

    Attributes:
      pages: that a request holds at its full length.
      requests: by key of SCHEMES, and "paged_prefix" where a prefix is shared.
      utilisation: by the same keys, the share of the cache's bytes that keys and values in use take, all requests at
        full length; for "paged_average" at their average length. Shared tokens count once.
    """

    prompt: int
    output: int
    pages: int
    requests: dict[str, int]
    utilisation: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The whole answer. Bytes are of one device."""

    model: str
    num_parameters: int
    weight_bytes: int
    activation_bytes: int
    device_bytes: int
    cache_bytes: int
    kv_heads_per_device: int
    stored_head_dim: int
    bytes_per_token_per_layer: int
    bytes_per_token: int
    layer_groups: int
    windows: tuple[int, ...]
    page_size: int
    bytes_per_page: int
    pages: int
    usable_pages: int
    slots: int
    max_len: int
    contiguous_tokens: int
    lines: tuple[Line, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, lists and dictionaries."""
        return dataclasses.asdict(self)


def parse_lengths(flag: str, texts: Sequence[str]) -> tuple[RequestShape, ...]:
    """("161/338", ...) as prompt/output. ConfigError names the flag and what it takes."""
    out = []
    for text in texts:
        prompt, slash, output = text.partition("/")
        if not (slash and prompt.strip().isdigit() and output.strip().isdigit()):
            raise ConfigError(f"{flag}: must be prompt/output in tokens, such as 161/338; got {text!r}")
        try:
            out.append(RequestShape(int(prompt), int(output)))
        except ValueError as error:
            raise ConfigError(f"{flag}: {text!r}: {error}") from None
    return tuple(out)


def make_plan(question: Question) -> Plan:
    """Does the arithmetic.

    Raises:
      ConfigError: weights that leave no room for pages, lengths beyond max_len, a combination that is not computed.
    """
    q, shape = question, question.shape
    max_len = q.max_len or shape.max_len
    weights = shape.num_parameters(q.devices) * DTYPE_BYTES[q.weight_dtype]
    activations = activation_bytes(
        num_tokens=q.step_tokens,
        num_rows=q.step_rows,
        hidden_size=shape.hidden_size,
        intermediate_size=-(-shape.intermediate_size // q.devices),
        vocab_size=-(-shape.vocab_size // q.devices),
    )
    cache = q.cache_bytes or cache_memory(q.device_bytes, weights, activations, q.fraction)
    heads = -(-shape.num_kv_heads // q.devices)
    sizes = (heads, padded_head_dim(shape.head_dim), DTYPE_BYTES[q.kv_dtype])
    scale = _SCALE_BYTES if q.kv_dtype in QUANTIZED_DTYPES else 0
    groups = shape.groups
    page = bytes_per_page(groups.num_places, *sizes, page_size=q.page_size, bytes_per_scale=scale)
    pages = pages_that_fit(cache, page)
    if pages < 1 + len(groups.windows):
        raise ConfigError(
            f"{shape.name}: {cache / 2**30:.2f} GiB are left for the cache, which is less than {1 + len(groups.windows)} "
            f"pages; weights take {weights / 2**30:.2f} and activations {activations / 2**30:.2f} of "
            f"{q.device_bytes / 2**30:.2f} GiB on each device, of which {q.fraction:g} may be used"
        )
    per_layer = bytes_per_token(1, *sizes, bytes_per_scale=scale)
    pool = _Pool(q, cache, pages - 1, per_layer, max_len)
    return Plan(
        model=shape.name,
        num_parameters=shape.num_parameters(),
        weight_bytes=weights,
        activation_bytes=activations,
        device_bytes=q.device_bytes,
        cache_bytes=cache,
        kv_heads_per_device=heads,
        stored_head_dim=sizes[1],
        bytes_per_token_per_layer=per_layer,
        bytes_per_token=per_layer * shape.num_layers,
        layer_groups=len(groups.windows),
        windows=tuple(sorted(set(shape.windows))),
        page_size=q.page_size,
        bytes_per_page=page,
        pages=pages,
        usable_pages=pages - 1,
        slots=(pages - 1) * q.page_size,
        max_len=max_len,
        contiguous_tokens=pool.contiguous_tokens,
        lines=tuple(pool.line(length) for length in q.lengths),
    )


class _Pool:
    """A device's cache, asked about one request shape after the other."""

    def __init__(self, question: Question, cache_bytes: int, usable_pages: int, bytes_per_layer: int, max_len: int):
        self.question, self.cache_bytes, self.usable_pages = question, cache_bytes, usable_pages
        self.bytes_per_layer, self.max_len = bytes_per_layer, max_len
        self.footprint = Footprint(question.page_size, question.shape.groups.windows)
        # A contiguous cache holds every token in every layer, whatever a layer sees of it.
        self.contiguous_tokens = cache_bytes // (bytes_per_layer * question.shape.num_layers)

    def line(self, length: RequestShape) -> Line:
        q, tokens = self.question, self.contiguous_tokens
        try:
            requests = {
                "contiguous_max": schemes.buddy_requests(tokens, schemes.reserved_max(length, self.max_len)),
                "contiguous_pow2": schemes.buddy_requests(tokens, schemes.reserved_pow2(length, self.max_len)),
                "contiguous_oracle": schemes.buddy_requests(tokens, schemes.reserved_oracle(length, self.max_len)),
                "chunks": schemes.chunk_requests(tokens, length.total, q.chunk_tokens),
                "paged": schemes.paged_requests(self.footprint, self.usable_pages, length, q.step_tokens),
                "paged_average": schemes.paged_requests_on_average(self.footprint, self.usable_pages, length),
            }
        except ValueError as error:
            raise ConfigError(f"{length.prompt}/{length.output}: {error}") from None
        if q.shared_prefix:
            requests["paged_prefix"] = self._with_prefix(length)
        return Line(
            prompt=length.prompt,
            output=length.output,
            pages=sum(self.footprint.most(length.total, q.step_tokens)),
            requests=requests,
            utilisation={scheme: self._utilisation(scheme, n, length) for scheme, n in requests.items()},
        )

    def _with_prefix(self, length: RequestShape) -> int:
        q = self.question
        if len(self.footprint.windows) > 1 or self.footprint.windows[0]:
            raise ConfigError("--shared_prefix: not computed for models with sliding windows")
        if q.shared_prefix > length.prompt:
            raise ConfigError(f"--shared_prefix: {q.shared_prefix} is longer than the prompt of {length.prompt} tokens")
        return max_concurrent_requests(self.usable_pages, length.total, q.page_size, q.shared_prefix)

    def _utilisation(self, scheme: str, requests: int, length: RequestShape) -> float:
        if scheme == "paged_average":
            each = sum(self._bytes_in_use(length.prompt + i) for i in range(length.output)) / length.output
        else:
            each = self._bytes_in_use(length.total)
        shared = 0
        if scheme == "paged_prefix" and requests:
            q = self.question
            shared = min(q.shared_prefix, length.total - 1) // q.page_size * q.page_size
            shared = (requests - 1) * self._bytes_in_use(shared)
        return (requests * each - shared) / self.cache_bytes

    def _bytes_in_use(self, num_tokens: int) -> int:
        """Keys and values that the next token can see: in a layer with a window only so many."""
        windows = self.question.shape.windows or (0,) * self.question.shape.num_layers
        return self.bytes_per_layer * sum(min(num_tokens, w) if w else num_tokens for w in windows)
