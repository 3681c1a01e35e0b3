"""Beam reordering: rows take over each other's pages and tokens, all at once, without moving keys or values."""

from __future__ import annotations

import jax

from pagedjax.pages import remap
from pagedjax.runner.state import EngineState, RowStatus
from pagedjax.runner.step import gather


def reorder(
    state: EngineState, rows: jax.Array, sources: jax.Array, num_tokens: jax.Array, tokens: jax.Array
) -> tuple[EngineState, jax.Array]:
    """Let each row become a copy of its source, as that was before the call, followed by one token.

    Args:
      rows: i32[C], distinct; padded with R.
      sources: i32[C] rows, repeated ones too.
      num_tokens: i32[C] tokens of the source to keep, all of them computed.
      tokens: i32[C] the token that comes after them.

    Returns:
      state (donated), num_unowned i32.
    """
    old = state.rows
    pages, _ = remap(state.pages, rows, sources)

    def put(values: jax.Array, update: jax.Array | int) -> jax.Array:
        return values.at[rows].set(update, mode="drop")

    token_ids = put(old.token_ids, gather(old.token_ids, sources))
    new = old.replace(
        token_ids=token_ids.at[rows, num_tokens].set(tokens, mode="drop"),
        num_tokens=put(old.num_tokens, num_tokens + 1),
        num_computed=put(old.num_computed, num_tokens),
        status=put(old.status, int(RowStatus.RUNNING)),
    )
    return state.replace(pages=pages, rows=new), pages.num_unowned
