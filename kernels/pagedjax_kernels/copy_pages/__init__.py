"""Copies whole pages: copy-on-write, compaction."""

from pagedjax_kernels.copy_pages.api import copy_pages as copy_pages
from pagedjax_kernels.copy_pages.permute import permute_pages as permute_pages
