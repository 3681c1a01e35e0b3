"""What one forward pass works on, besides the weights and the pages."""

from __future__ import annotations

import flax.struct
import jax


@flax.struct.dataclass
class Batch:
    """The tokens of one step, ragged: row b of the step owns tokens cu_q_lens[b] to cu_q_lens[b+1].

    A pytree; `max_q_len` and `backend` are static, so each of their values is a program of its own.

    Attributes:
      token_ids: i32[T].
      positions: i32[T], the token's position in its sequence, from 0.
      slot_mapping: i32[G, T], or i32[T] for one group: where the token's K and V go, page * S + offset, the same in every
        layer of a group. Padding tokens have distinct slots >= N * S, which are dropped.
      page_table: i32[G, B, P], physical page of every logical page, one table a layer group (G = 1 for Llama).
      kv_lens: i32[B], tokens of each row including this step's; 0 for an empty row.
      cu_q_lens: i32[B+1], running sum of the rows' tokens in this step, from 0. Tokens from cu_q_lens[B] on are
        padding.
      max_q_len: static bound on a row's tokens in this step; 1 promises pure decode with T == B, token b of row b.
        None: no bound.
      backend: paged-attention backend, "auto" or a name.
    """

    token_ids: jax.Array
    positions: jax.Array
    slot_mapping: jax.Array
    page_table: jax.Array
    kv_lens: jax.Array
    cu_q_lens: jax.Array
    max_q_len: int | None = flax.struct.field(pytree_node=False, default=None)
    backend: str = flax.struct.field(pytree_node=False, default="auto")
