"""One continuation of one request, as the host sees it."""

from __future__ import annotations

import dataclasses
import enum
import math

import numpy as np

from pagedjax.types import Request


class Phase(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    PREFILL = "prefill"  # has a row; tokens it knows are still to be computed
    DECODE = "decode"  # has a row; all but its last token are computed
    ENDED = "ended"


@dataclasses.dataclass(eq=False)
class Sequence:
    """Counts and ids; its keys and values are in the row's pages.

    Attributes:
      request: what the client asked for.
      index: which of the request's n continuations this is.
      rank: arrival order, the smaller the earlier; kept through preemption.
      max_total: length, prompt included, at which it ends.
      namespace: prefix-cache namespace id.
      token_ids: i32[max_total] prompt and generated ids; the first num_tokens are valid.
      num_computed: tokens whose keys and values are in pages; 0 while it waits.
      num_published: tokens in the prefix index under this sequence.
      row: its row, None while it waits.
      num_preemptions: times it lost its row.
      parent: the first continuation of its request, whose pages it takes over once the prompt is computed.
      held: it has sampled, and waits for the other beams of its request before it goes on.
      shares_last_page: it was forked and writes next into a page that others hold too: a copy is due.
      head: its first page as bytes, set by the scheduler, to tell at once that two prompts share nothing.
      arrived, deadline_at: when it came and when it must have ended, seconds on the scheduler's clock.
      service: what its tenant had been served when it got its row, see `policy.Tenants`.
      is_charged: its tenant has paid for its prompt; num_charged: generated tokens that its tenant has paid for.
      page_keys, expected_hit, last_key, next_key, num_noted: see `prefixes.KnownPrefixes`. Hashes of its pages with all
        that comes before, as far as they were needed; tokens expected to be found, -1 before it was looked at; the hashes of
        the last page that is expected and of the first that is not; pages that were remembered.
    """

    request: Request
    index: int
    rank: int
    max_total: int
    namespace: int
    token_ids: np.ndarray
    num_tokens: int
    num_computed: int = 0
    num_published: int = 0
    row: int | None = None
    phase: Phase = Phase.WAITING
    num_preemptions: int = 0
    parent: Sequence | None = None
    held: bool = False
    shares_last_page: bool = False
    head: bytes = b""
    arrived: float = math.nan
    deadline_at: float = math.inf
    service: float = 0.0
    is_charged: bool = False
    num_charged: int = 0
    page_keys: list[int] = dataclasses.field(default_factory=list)
    expected_hit: int = -1
    last_key: int | None = None
    next_key: int | None = None
    num_noted: int = 0

    @classmethod
    def start(cls, request: Request, *, index: int, rank: int, max_total: int, namespace: int) -> Sequence:
        """A sequence that has its prompt and waits."""
        prompt = request.prompt_ids
        token_ids = np.zeros(max_total, np.int32)
        token_ids[: len(prompt)] = prompt
        return cls(request, index, rank, max_total, namespace, token_ids, len(prompt))

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def its_row(self) -> int:
        """The row of a sequence that has one."""
        assert self.row is not None, "a sequence without a row is in no step"
        return self.row

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.prompt_len

    @property
    def known_ids(self) -> np.ndarray:
        return self.token_ids[: self.num_tokens]

    @property
    def match_tokens(self) -> int:
        """Tokens that the prefix cache may look at; 1 means none, since a hit never covers the last one."""
        # Prompt log-probabilities need every prompt position computed.
        reads = self.request.read_prefix_cache and self.request.sampling.prompt_logprobs is None
        return self.num_tokens if reads else 1

    @property
    def waits_for_fork(self) -> bool:
        """Whether the prompt is just computed, or about to be, for the request's first continuation."""
        return self.parent is not None and self.parent.num_generated == 0 and self.parent.phase is not Phase.ENDED

    def append(self, ids: list[int]) -> None:
        """Take generated ids over."""
        self.shares_last_page = False
        self.token_ids[self.num_tokens : self.num_tokens + len(ids)] = ids
        self.num_tokens += len(ids)

    def continue_as(self, ids: np.ndarray, token: int, num_published: int) -> None:
        """Become the beam that knows `ids`, all of them computed if this sequence has a row, and then `token`."""
        self.token_ids[: len(ids)] = ids
        self.token_ids[len(ids)] = token
        self.num_tokens, self.held, self.shares_last_page = len(ids) + 1, False, False
        if self.row is not None:
            self.num_computed, self.num_published = len(ids), num_published
            self.update_phase()

    def cut(self, num_tokens: int) -> None:
        """Forget what ran past a stop string."""
        self.num_tokens = num_tokens
        self.num_computed = min(self.num_computed, num_tokens)

    def place(self, row: int, hit: int) -> None:
        """It got a row, and `hit` tokens from the prefix cache or another row."""
        self.row, self.num_computed = row, hit
        self.update_phase()

    def update_phase(self) -> None:
        self.phase = Phase.DECODE if self.num_computed == self.num_tokens - 1 else Phase.PREFILL

    def displace(self) -> None:
        """It lost its row (preempted, or not admitted after all) and waits again."""
        self.row, self.num_computed, self.num_published, self.phase = None, 0, 0, Phase.WAITING
        self.page_keys, self.expected_hit, self.last_key, self.num_noted = [], -1, None, 0
        self.shares_last_page = self.held = False
