"""What the engine counts."""

from __future__ import annotations

import collections
import dataclasses

from pagedjax.runner import Runner


@dataclasses.dataclass
class Counters:
    """Totals since the engine began. `prefix_*` are tokens looked up and found, resumed sequences included;
    `cached_prompt_tokens` are the found ones of new requests."""

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
    finished: collections.Counter = dataclasses.field(default_factory=collections.Counter)


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """A moment of the engine.

    Attributes:
      num_running, num_waiting: sequences.
      pages_free, pages_active, pages_shared, pages_cached, pages_pending: pages by state; `active` have one owner.
      pages_total: usable pages (the reserved one left out).
      kv_usage: share of the usable pages that somebody owns, 0 to 1.
      compilations_after_warm_up: programs compiled since warm-up; should stay 0.
      swapped_out_pages, swapped_in_pages: of preempted sequences, to the host and back.
      spilled_pages, revived_pages: cached pages copied to the host, and found there by later requests.
      host_pages_used, host_pages_total: of the host pool.
      forks: rows that began as copies of others; page_copies: pages copied when one of them first wrote.
      requests_finished: by finish reason.
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
    host_pages_used: int = 0
    host_pages_total: int = 0
    forks: int = 0
    page_copies: int = 0
    steps: int = 0
    dispatches: int = 0
    compilations_after_warm_up: int = 0
    requests_finished: dict[str, int] = dataclasses.field(default_factory=dict)

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
        pages = runner.page_stats()
        owned = runner.num_usable_pages - int(pages.free) - int(pages.cached)
        return cls(
            num_running=num_running,
            num_waiting=num_waiting,
            pages_free=int(pages.free),
            pages_active=int(pages.active),
            pages_shared=int(pages.shared),
            pages_cached=int(pages.cached),
            pages_pending=int(pages.pending),
            pages_total=runner.num_usable_pages,
            kv_usage=owned / runner.num_usable_pages,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            cached_prompt_tokens=counters.cached_prompt_tokens,
            preemptions=counters.preemptions,
            swapped_out_pages=counters.swapped_out_pages,
            swapped_in_pages=counters.swapped_in_pages,
            spilled_pages=counters.spilled_pages,
            revived_pages=counters.revived_pages,
            host_pages_used=host_pages[0],
            host_pages_total=host_pages[1],
            forks=counters.forks,
            page_copies=runner.num_page_copies,
            steps=counters.steps,
            dispatches=counters.dispatches,
            compilations_after_warm_up=compilations,
            requests_finished={str(reason): n for reason, n in counters.finished.items()},
        )
