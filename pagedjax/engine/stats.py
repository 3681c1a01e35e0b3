"""What the engine counts."""

from __future__ import annotations

import collections
import dataclasses

from pagedjax.pages import owned_shares, pool_shares, sharing_ratio
from pagedjax.runner import Runner


@dataclasses.dataclass
class Counters:
    """Totals since the engine began. `prefix_*` are tokens looked up and found, resumed sequences included;
    `cached_prompt_tokens` are the found ones of new requests; `forks` are rows that began as copies of others;
    `requests_finished` are sequences by finish reason."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    swapped_out_pages: int = 0
    swapped_in_pages: int = 0
    spilled_pages: int = 0
    revived_pages: int = 0
    forks: int = 0
    steps: int = 0
    dispatches: int = 0
    warm_up_seconds: float = 0.0
    requests_finished: dict[str, int] = dataclasses.field(default_factory=collections.Counter)


@dataclasses.dataclass
class EngineStats(Counters):
    """A moment of the engine: its totals so far, and what there is now.

    Attributes:
      num_running, num_waiting: sequences.
      pages_free, pages_active, pages_shared, pages_cached, pages_pending: pages by state; `active` have one owner.
      pages_total: usable pages (the reserved one left out).
      kv_usage: share of the usable pages that somebody owns, 0 to 1.
      sharing_ratio: share of the page-table entries saved by sharing, 0 to 1; see `pagedjax.pages.sharing_ratio`.
      owned_shares: what the token slots of the pages in tables are: `tokens`, `reserved` (a running row may fill them yet)
        and `internal` (none can). They add up to 1; all are 0 where no page is in a table.
      pool_shares: the same of all pages, with `cached`, `free`, `pending` and `external`. They add up to 1.
      page_copies: pages copied when one of their holders first wrote.
      compilations_after_warm_up: programs compiled since warm-up; should stay 0.
      host_pages_used, host_pages_total: of the host pool.
    """

    num_running: int = 0
    num_waiting: int = 0
    pages_free: int = 0
    pages_active: int = 0
    pages_shared: int = 0
    pages_cached: int = 0
    pages_pending: int = 0
    pages_total: int = 0
    kv_usage: float = 0.0
    host_pages_used: int = 0
    host_pages_total: int = 0
    sharing_ratio: float = 0.0
    owned_shares: dict[str, float] = dataclasses.field(default_factory=dict)
    pool_shares: dict[str, float] = dataclasses.field(default_factory=dict)
    page_copies: int = 0
    compilations_after_warm_up: int = 0

    @classmethod
    def collect(
        cls,
        counters: Counters,
        runner: Runner,
        *,
        num_running: int,
        num_waiting: int,
        compilations: int,
        host_pages: tuple[int, int] = (0, 0),
    ) -> EngineStats:
        """Put counters and the device's page counts together; host_pages: (used, all) of the host pool."""
        states, counts = runner.page_counts()
        totals = vars(counters) | {"requests_finished": {str(k): n for k, n in counters.requests_finished.items()}}
        return cls(
            **totals,
            **{f"pages_{name}": number for name, number in states._asdict().items()},
            num_running=num_running,
            num_waiting=num_waiting,
            pages_total=runner.num_usable_pages,
            host_pages_used=host_pages[0],
            host_pages_total=host_pages[1],
            kv_usage=1 - float(states.free + states.cached) / runner.num_usable_pages,
            sharing_ratio=sharing_ratio(counts),
            owned_shares=owned_shares(counts),
            pool_shares=pool_shares(states, counts, runner.page_size),
            page_copies=runner.num_page_copies,
            compilations_after_warm_up=compilations,
        )
