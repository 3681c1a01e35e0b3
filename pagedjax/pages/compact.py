"""Giving pages new numbers so that the pages of a row adjoin."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pagedjax.pages.state import NULL_PAGE, Pages


def contiguity(pages: Pages) -> jax.Array:
    """f32: share of the steps from one logical page to the next that lead to the next physical page; 1 where there are
    none. A row without gaps can be read as one block."""
    before, after = pages.table[..., :-1], pages.table[..., 1:]
    steps = (before != NULL_PAGE) & (after != NULL_PAGE)
    adjoining = jnp.sum(steps & (after == before + 1), dtype=jnp.int32)
    return jnp.where(steps.any(), adjoining / jnp.maximum(jnp.sum(steps, dtype=jnp.int32), 1), 1.0).astype(jnp.float32)


def compact(pages: Pages) -> tuple[Pages, jax.Array]:
    """Renumber pages: those in tables become 1, 2, 3, ... in the order of the rows, group by group, so that each row lies in
    one piece but for pages that an earlier row holds too. Nothing else changes. Costs O(N): for rare use.

    No page may be pinned: whoever pinned it knows it by its old number.

    Args:
      pages: donated.

    Returns:
      pages, source i32[N]: the content of new page p is that of old page source[p] (`permute_pages`).
    """
    G, R, P = pages.table.shape
    N = pages.total_pages
    ids = jnp.arange(N, dtype=jnp.int32)
    walk = pages.table.transpose(1, 0, 2).reshape(-1)
    place = jnp.arange(R * G * P, dtype=jnp.int32)
    first = jnp.full(N, R * G * P, jnp.int32).at[walk].min(place).at[NULL_PAGE].set(R * G * P)
    owned = first < R * G * P
    num_owned = jnp.sum(owned, dtype=jnp.int32)
    ranked = jnp.argsort(first, stable=True).astype(jnp.int32)  # owned ones in walking order, then the others
    label = jnp.zeros(N, jnp.int32).at[ranked].set(ids + 1)

    # The others stay where they are if they can; those below take over the numbers that became free above.
    displaced = ~owned & (ids >= 1) & (ids <= num_owned)
    vacated = owned & (ids > num_owned)
    free = (
        jnp.zeros(N, jnp.int32)
        .at[jnp.where(vacated, jnp.cumsum(vacated, dtype=jnp.int32) - 1, N + ids)]
        .set(ids, mode="drop")
    )
    label = jnp.where(owned, label, ids)
    label = jnp.where(displaced, free[jnp.maximum(jnp.cumsum(displaced, dtype=jnp.int32) - 1, 0)], label)
    source = jnp.zeros(N, jnp.int32).at[label].set(ids)

    def moved(values: jax.Array) -> jax.Array:
        return values[source]

    parent = pages.parent
    parent = jnp.where((parent > 0) & (parent < N), label[jnp.minimum(parent, N - 1)], parent)
    return pages.replace(
        table=label[pages.table],
        ref_counts=moved(pages.ref_counts),
        queue=label[pages.queue],
        stamp=moved(pages.stamp),
        generation=moved(pages.generation),
        parent=moved(parent),
        parent_generation=moved(pages.parent_generation),
        hash=moved(pages.hash),
        tokens=moved(pages.tokens),
        buckets=label[pages.buckets],
        children=label[pages.children],
    ), source
