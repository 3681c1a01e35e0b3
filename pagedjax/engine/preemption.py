"""What becomes of the pages of a preempted sequence: computed again, or kept on the host."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class PreemptionCost:
    """What both ways cost, in seconds, as measured in this process.

    Attributes:
      token: to compute a token of a prompt.
      page_out, page_in: to move a page to the host, and back.
    """

    token: float | None
    page_out: float | None
    page_in: float | None

    def swap_is_cheaper(self, num_tokens: int, pages_out: int, pages_in: int) -> bool:
        """Whether moving pages costs less than computing num_tokens again; False where a cost is not known yet.

        What the prefix cache will still have on resume spares both ways the same share, and is left out.
        """
        if self.token is None or self.page_out is None or self.page_in is None:
            return False
        return pages_out * self.page_out + pages_in * self.page_in < num_tokens * self.token
