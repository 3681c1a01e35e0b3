"""Attention over paged keys and values: decode, prefill chunks and mixtures of them, one op."""

from pagedjax_kernels.paged_attention.api import paged_attention as paged_attention
