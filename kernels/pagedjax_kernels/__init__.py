"""Paged-attention operations for JAX (see kernels/README.md). Imports jax only, never pagedjax.

Axis letters, used in every docstring of this package and of pagedjax:

R rows (sequences) · B lanes (rows in this dispatch) · P logical pages per row · N physical pages · S page size
(slots) · T tokens this step · L layers · G layer groups · K KV heads · H query heads · D head dim · V vocabulary.
"""

from pagedjax_kernels.cache import KVCache as KVCache
from pagedjax_kernels.cache import init_cache as init_cache
from pagedjax_kernels.cache import padded_head_dim as padded_head_dim
from pagedjax_kernels.copy_pages import copy_pages as copy_pages
from pagedjax_kernels.copy_pages import permute_pages as permute_pages
from pagedjax_kernels.kv_update import kv_update as kv_update
from pagedjax_kernels.paged_attention import paged_attention as paged_attention
