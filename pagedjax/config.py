"""The typed configuration. Every default lives here, once, with its unit and its range; flags and files derive from it.

`--config=FILE` and `--config.section.field=value` are built from these classes by `pagedjax.flags`.
"""

from __future__ import annotations

import dataclasses

from pagedjax.options import check, option, options

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Which model, and in what precision."""

    path: str = option(
        "default",
        "a directory with safetensors, a .gguf file, an Orbax checkpoint, a Hugging Face id, 'default' "
        "(SmolLM2-135M-Instruct), or 'gemma3-270m'",
    )
    dtype: str = option(
        "auto",
        "weights and activations; auto: bfloat16 where the device is fast at it, else float32",
        choices=DTYPES,
    )
    max_model_len: int = option(
        0,
        "longest sequence, in tokens; 0: the model's own context, capped by the pages there are",
        low=0,
        high=2**20,
    )
    served_name: str = option("", "the name clients use; empty: the model's own")
    chat_template: str = option("", "path of a Jinja chat template that replaces the model's own")


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """The KV pages."""

    page_size: int = option(16, "tokens in a page", low=1, high=256)
    num_pages: int = option(0, "physical pages, one of them reserved; 0: from memory_fraction", low=0, high=2**24)
    memory_fraction: float = option(
        0.85,
        "share of the device memory that weights, activations and pages may use together (CPU: at most 2 GiB of pages)",
        low=0.05,
        high=0.98,
    )
    dtype: str = option(
        "auto",
        "of the KV pages; auto: as the model (float32 on CPU with JAX 0.10)",
        choices=(*DTYPES, "int8", "float8_e4m3fn"),
    )
    prefix_caching: bool = option(True, "keep pages of finished sequences and map them into requests that begin alike")
    host_pages: int = option(
        0, "pages in host memory, for preempted sequences and spilled pages; 0: none", low=0, high=2**24
    )
    spill: bool = option(False, "copy cached pages to the host before they are recycled, and bring them back on a hit")
    allocation: str = option(
        "paged",
        "when sequences get pages: paged, one at a time; for comparison with other systems, contiguous, all at admission in "
        "one piece, or chunked, cache.chunk_tokens at a time. The last two share nothing: set cache.prefix_caching=false",
        choices=("paged", "contiguous", "chunked"),
    )
    reserve: str = option(
        "max_len",
        "what contiguous reserves for a request: max_len, the longest sequence; pow2, its prompt and its max_tokens rounded "
        "up to a power of two; request, its prompt and max_tokens",
        choices=("max_len", "pow2", "request"),
    )
    chunk_tokens: int = option(
        128, "tokens by which a sequence grows with chunked, a multiple of page_size", low=1, high=2**20
    )


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """How many sequences and tokens go into one step."""

    max_num_seqs: int = option(64, "sequences that run at once (rows)", low=1, high=4096)
    max_num_batched_tokens: int = option(512, "tokens in one step: prefill chunks are cut to it", low=8, high=65536)
    max_waiting: int = option(4096, "requests that may wait; one more is refused (HTTP 429)", low=1, high=10**6)
    policy: str = option(
        "first_come",
        "who goes first: first_come, priority (a request's `priority`, lower is more urgent), shortest_prefix (fewest prompt "
        "tokens to compute), fair_share (the tenant served least), earliest_deadline, or one that was added to "
        "pagedjax.policy.POLICIES",
    )
    preemption: str = option(
        "auto",
        "what becomes of a sequence that must yield its pages: recompute, swap (to cache.host_pages), or auto, the cheaper "
        "of the two as measured",
        choices=("auto", "recompute", "swap"),
    )
    growth_share: float = option(
        0.25,
        "share of a request's possible output for which pages must be free before it is admitted",
        low=0.0,
        high=1.0,
    )


@dataclasses.dataclass(frozen=True)
class RunnerConfig:
    """Shapes that are compiled at start-up, and how long the device runs between two looks of the host."""

    lane_buckets: tuple[int, ...] = option(
        (), "numbers of lanes to compile for; empty: 8, 32, ... up to max_num_seqs", low=1, high=4096
    )
    token_buckets: tuple[int, ...] = option(
        (),
        "numbers of tokens to compile prefill for; empty: 64, 256, ... up to max_num_batched_tokens",
        low=1,
        high=65536,
    )
    max_steps: int = option(64, "most decode steps in one dispatch", low=1, high=1024)
    slice_ms: float = option(
        100.0, "milliseconds one dispatch should last at most when somebody streams or waits", low=1, high=10000
    )
    overlap: bool = option(
        True, "start the next decode loop before the last one is read, while nobody waits; slices are half as long then"
    )
    stop_string_budget: int = option(
        8, "tokens a sequence with stop strings decodes before the host looks at its text", low=1, high=256
    )
    attention_backend: str = option(
        "auto",
        "paged-attention backend; a named one serves or fails with its reason",
        choices=("auto", "native_cpu", "pallas_gpu", "pallas_tpu", "reference", "triton", "xla"),
    )
    check_every: int = option(0, "check the page invariants every so many steps; 0: never", low=0, high=10**9)
    compilation_cache: str = option("auto", "folder for compiled programs; auto: the user's cache folder; empty: none")
    warm_up: bool = option(True, "compile everything before the first request")


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """The HTTP server."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 takes a free one", low=0, high=65535)
    api_keys: tuple[str, ...] = option(
        (),
        "keys that clients must send as 'Authorization: Bearer ...'; empty: open (only on a loopback address). "
        "Other users of the machine can read a command line: prefer api_key_file or PAGEDJAX_API_KEYS",
    )
    api_key_file: str = option("", "file with one key a line, added to api_keys")
    allow_open: bool = option(False, "listen on an address that others can reach although there is no key")
    share_prefixes: bool = option(
        False, "let requests under different keys share cached prefixes (their timing then tells who asked what)"
    )
    drain_seconds: float = option(30.0, "after SIGTERM, how long running requests may go on", low=0, high=3600)
    max_body_bytes: int = option(8 * 2**20, "largest request body", low=1024, high=2**30)
    max_header_bytes: int = option(64 * 2**10, "largest request head", low=1024, high=2**24)
    receive_seconds: float = option(
        30.0, "longest wait for a request's head, and for each further part of its body", low=0.1, high=3600
    )
    send_seconds: float = option(
        60.0, "how long a client may leave a stream unread before its request is aborted", low=0.1, high=3600
    )
    max_prompts: int = option(1024, "prompts in one completion request", low=1, high=65536)
    max_sequences: int = option(2048, "prompts times n in one request", low=1, high=65536)


@dataclasses.dataclass(frozen=True)
class SnapshotConfig:
    """The engine's state on disk."""

    load: str = option(
        "", "folder of a snapshot whose prefix cache the engine starts with; one that does not exist is passed over"
    )
    save_on_exit: str = option("", "folder where a server that is asked to stop (SIGTERM) leaves a snapshot")


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything a server or an `LLM` needs. Checked on construction: ConfigError names the field, value and range."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    cache: CacheConfig = dataclasses.field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
    runner: RunnerConfig = dataclasses.field(default_factory=RunnerConfig)
    server: ServerConfig = dataclasses.field(default_factory=ServerConfig)
    snapshot: SnapshotConfig = dataclasses.field(default_factory=SnapshotConfig)
    seed: int = option(0, "seeds requests that bring none (0: from the operating system)", low=0, high=2**63 - 1)

    def __post_init__(self) -> None:
        for path, entry in options(self):
            check(path, entry.value, entry.type, entry.field.metadata)
