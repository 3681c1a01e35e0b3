"""Writes this step's keys and values into their pages."""

from pagedjax_kernels.kv_update.api import kv_update as kv_update
