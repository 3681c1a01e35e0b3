"""The static facts of one attention call: what backends are chosen by and specialised on."""

from __future__ import annotations

from typing import NamedTuple

from pagedjax_kernels.tuning import ShapeClass


class AttentionCase(NamedTuple):
    """Attributes:
    num_tokens, num_rows, max_pages: T, B, P.
    num_heads, num_kv_heads: H, K.
    head_dim: q's D.
    page_head_dim: the pages' D, which may be larger (padded).
    page_size: S.
    q_dtype, kv_dtype: names.
    max_q_len: the static bound on a row's queries; 1 promises query b to row b. None: no bound.
    scale, soft_cap: static floats; soft_cap None is off.
    window: "none" or "some" (static or traced; a traced one may still be 0, full attention).
    sinks: whether there are any.
    paired: whether K and V of a head lie in one row of the pages (Layout.PAIRS).
    packed_scales: whether the scales lie as on TPUs.
    """

    num_tokens: int
    num_rows: int
    max_pages: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_head_dim: int
    page_size: int
    q_dtype: str
    kv_dtype: str
    max_q_len: int | None
    scale: float
    soft_cap: float | None
    window: str
    sinks: bool
    paired: bool = False
    packed_scales: bool = False

    @property
    def shape_class(self) -> ShapeClass:
        """What sizes of blocks and splits may depend on."""
        group = self.num_heads // self.num_kv_heads
        return ShapeClass(self.q_dtype, self.kv_dtype, self.head_dim, group, self.page_size)
