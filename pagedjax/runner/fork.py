"""Fork: a row begins as a copy of another one that shares all of its pages; nothing is computed again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, struct

from pagedjax.pages import remap
from pagedjax.runner.state import EngineState, RowStatus
from pagedjax.runner.step import Params, append, gather
from pagedjax.sampling import RowSampling, SampleOutput, reset_counts, set_rows

Values = Any  # a jax.Array inside programs, numpy or a shape outside


class Fork(struct.PyTreeNode):
    """Rows to be forked off, C at a time. Padded entries have row R."""

    rows: Values  # i32[C] empty rows
    sources: Values  # i32[C] rows to copy
    num_tokens: Values  # i32[C] leading tokens of the source that the new row knows
    num_computed: Values  # i32[C] of them, those whose keys and values it takes over
    prompt_lens: Values  # i32[C] known tokens that count as prompt
    max_tokens: Values  # i32[C] total length
    samples: Values  # bool[C] all known tokens are computed: sample the next one from `hidden`
    sampling: RowSampling  # each field [C, ...]
    uses_counts: Values  # bool[C] the row's penalties need token_counts


class ForkReport(struct.PyTreeNode):
    """What the host reads after a fork, one entry a new row."""

    status: jax.Array  # i32[C] RowStatus
    samples: SampleOutput


def fork(
    graph: nnx.GraphDef, params: Params, state: EngineState, hidden: jax.Array, new: Fork
) -> tuple[EngineState, ForkReport]:
    """Share the sources' pages with the new rows, each with its own sampling parameters.

    Args:
      hidden: [C, d] hidden states of the last known tokens; read only where new.samples.

    Returns:
      state (donated), ForkReport.
    """
    rows = state.rows
    # A source with fewer tokens than pages for them (it sampled on) shares those too; copy-on-write sorts them out.
    pages, _ = remap(state.pages, new.rows, new.sources)
    token_ids = gather(rows.token_ids, new.sources)

    def put(values: jax.Array, update: jax.Array) -> jax.Array:
        return values.at[new.rows].set(update, mode="drop")

    counted = jnp.where(new.uses_counts, new.rows, rows.max_rows)
    rows = rows.replace(
        token_ids=put(rows.token_ids, token_ids),
        num_tokens=put(rows.num_tokens, new.num_tokens),
        num_computed=put(rows.num_computed, new.num_computed),
        prompt_lens=put(rows.prompt_lens, new.prompt_lens),
        max_tokens=put(rows.max_tokens, new.max_tokens),
        status=put(rows.status, jnp.full_like(new.rows, RowStatus.RUNNING)),
        sampling=set_rows(rows.sampling, new.rows, new.sampling),
        token_counts=reset_counts(rows.token_counts, counted, token_ids, new.prompt_lens, new.num_tokens),
    )
    logits = nnx.merge(graph, params).logits(hidden)
    rows, samples = append(rows, new.rows, new.samples, logits)
    state = state.replace(pages=pages, rows=rows)
    return state, ForkReport(status=gather(rows.status, new.rows), samples=samples)


def pick(hidden: jax.Array, index: jax.Array) -> jax.Array:
    """hidden[index]: [C, d] of a mixed step's hidden states [T, d]."""
    return hidden[index]
