"""Paged-attention operations for JAX (see kernels/README.md). Imports jax only, never pagedjax.

Axis letters, used in every docstring of this package and of pagedjax:

R rows (sequences) · B lanes (rows in this dispatch) · P logical pages per row · N physical pages · S page size (slots) ·
T tokens this step · L layers · G layer groups · K KV heads · H query heads · D head dim · V vocabulary.
"""
