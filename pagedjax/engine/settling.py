"""What becomes of the pages of rows: published while they run, published and given back when they end."""

from __future__ import annotations

from pagedjax.config import Config
from pagedjax.engine.group import Continuation
from pagedjax.engine.host_tier import HostTier
from pagedjax.engine.stats import Counters
from pagedjax.runner import Runner, Settlement
from pagedjax.scheduler import Phase, Scheduler, Sequence


class Settling:
    """Publishes and releases rows, on the device and in the host's books.

    Attributes:
      most_steps: decode steps after which a running row has to be looked at, so that its pages are published before they
        fall out of a window.
    """

    def __init__(
        self, config: Config, runner: Runner, scheduler: Scheduler, tier: HostTier, counters: Counters
    ) -> None:
        self._runner, self._scheduler, self._tier, self._counters = runner, scheduler, tier, counters
        self._caching = config.cache.prefix_caching
        windows = [window for window in runner.windows if window]
        self._publish_every = max(runner.page_size, min(windows) // 2) if windows else None
        self.most_steps = runner.buffer_steps
        if self._publish_every and self._caching:
            # Two loops in flight must not carry a window past what was published last.
            self.most_steps = max(1, (self._publish_every - runner.page_size) // 2)

    def publish(self, sequences: list[Sequence]) -> None:
        """Enter the full pages of running sequences into the prefix index; give back what is behind their windows."""
        if sequences and (self._caching or self._publish_every):
            self.settle(sequences, release=False)
        for sequence in sequences:
            sequence.num_published = self._full_pages(sequence.num_computed)

    def is_due(self, sequence: Sequence) -> bool:
        """Whether a sequence that goes on should be published: its prompt is complete, or pages may fall out of a window
        that are not published yet. After a chunk this also gives back what is behind the window by now."""
        if sequence.phase is Phase.DECODE and sequence.num_published < self._full_pages(sequence.prompt_len):
            return True
        if self._publish_every is None:
            return False
        return sequence.phase is Phase.PREFILL or sequence.num_computed - sequence.num_published >= self._publish_every

    def _full_pages(self, num_tokens: int) -> int:
        """Tokens in the full pages of num_tokens."""
        return num_tokens // self._runner.page_size * self._runner.page_size

    def end(self, ended: list[Continuation]) -> None:
        """Publish and release the rows of ended sequences, and drop them from the queues."""
        self.settle([c.sequence for c in ended if c.sequence.row is not None], release=True)
        for continuation in ended:
            sequence = continuation.sequence
            self._tier.forget(sequence)
            self._scheduler.remove(sequence)
            sequence.phase, sequence.row = Phase.ENDED, None
            assert continuation.finish_reason is not None
            self._counters.requests_finished[continuation.finish_reason] += continuation.counts

    def settle(self, sequences: list[Sequence], *, release: bool) -> None:
        """Publish what these sequences with rows computed, and release their rows or leave them."""
        rows = [
            Settlement(s.its_row, length=s.num_computed if self._caching else 0, namespace=s.namespace, release=release)
            for s in sequences
        ]
        self._tier.note_published(sequences, self._runner.settle(rows))
