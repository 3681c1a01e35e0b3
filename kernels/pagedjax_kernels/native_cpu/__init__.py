"""The ops in C++ for CPUs, on XLA's own threads: built for this machine at first use."""

from pagedjax_kernels.native_cpu.library import why_not as why_not
from pagedjax_kernels.native_cpu.ops import ACTIVATIONS as ACTIVATIONS
from pagedjax_kernels.native_cpu.ops import WRITABLE as WRITABLE
from pagedjax_kernels.native_cpu.ops import kv_update_native as kv_update_native
from pagedjax_kernels.native_cpu.ops import paged_attention_native as paged_attention_native
