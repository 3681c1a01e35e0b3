"""The Triton backend without a GPU: its kernels interpreted on numpy arrays, in a process of their own.

Triton decides when it is imported whether it compiles or interprets, so `start` must come before that, and other tests of
the same process would be interpreted with it: use it in a worker.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import jax.numpy as jnp
import numpy as np
from pagedjax_kernels.copy_pages import triton as copy_backend
from pagedjax_kernels.paged_attention import triton as backend
from pagedjax_kernels.paged_attention.api import _checked

from tests.kernels.harness import Call, as_on_a_gpu


class Tensor:
    """As much of a torch.Tensor as the interpreter asks for, around a numpy array."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.dtype = array.dtype.name

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return self

    def new_empty(self, size: int, device: str) -> Tensor:
        return Tensor(self.array)

    def set_(self, storage: Tensor, offset: int, size: Any, stride: Any) -> None:
        self.array = storage.array

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple:
        return self.array.shape

    def stride(self) -> tuple:
        return self.array.strides

    def copy_(self, other: Tensor) -> None:
        assert other.data_ptr() == self.data_ptr()


def start() -> None:
    """Once, in a fresh process."""
    os.environ["TRITON_INTERPRET"] = "1"
    for module in (backend, copy_backend):
        module.launch = functools.partial(launch, *module.launch.args)  # type: ignore[assignment]
    _mend()


def _mend() -> None:
    """Triton 3.6's interpreter keeps bfloat16 and float8 as unsigned integers: it multiplies those as integers, turns an
    int8 into a bfloat16 bit by bit, and rounds a bfloat16 up at every half. Also, it keeps scalars as arrays of one
    element, which numpy 2.5 no longer converts by int()."""
    import triton.language as tl
    from triton.runtime import interpreter

    numpy_types = {tl.bfloat16: jnp.bfloat16, tl.float8e4nv: jnp.float8_e4m3fn}
    numpy_types |= {tl.float16: np.float16, tl.float32: np.float32}

    def convert(data, from_type, to_type, rounding_mode):
        values = np.ascontiguousarray(data).view(numpy_types[from_type]).astype(np.float32)
        return values.astype(numpy_types[to_type]).view(f"uint{to_type.primitive_bitwidth}")

    cast = interpreter.InterpreterBuilder.cast_impl

    def cast_from_int8(builder, src, to_type):
        if (src.dtype.scalar, to_type.scalar) == (tl.int8, tl.bfloat16):
            return interpreter.TensorHandle(src.data.astype(jnp.bfloat16).view(np.uint16), tl.bfloat16)
        return cast(builder, src, to_type)

    def dot(builder, a, b, d, input_precision, max_num_imprecise_acc):
        x, y = (np.ascontiguousarray(t.data).view(numpy_types[t.dtype.scalar]).astype(np.float32) for t in (a, b))
        return interpreter.TensorHandle(x @ y + d.data, d.dtype.scalar)

    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.cast_impl = cast_from_int8
    interpreter.InterpreterBuilder.create_dot = dot
    interpreter._patch_lang_tensor = patch_lang_tensor


def launch(
    module: str,
    kernel: str,
    *args,
    out_shape,
    grid,
    zeroed=False,
    in_place=False,
    num_warps=None,
    num_stages=None,
    **options,
):
    """As triton_call.launch. What a kernel does not write is NaN, or as it was where it works in place."""
    many = isinstance(out_shape, list)
    shapes = out_shape if many else [out_shape]
    arrays = [np.asarray(a) for a in args]
    if in_place:
        outs = [arrays[0].copy()]
        arrays[0] = outs[0]
    else:
        outs = [np.full(s.shape, 0 if zeroed else np.nan, s.dtype) for s in shapes]
    tensors = [Tensor(x) for x in arrays + outs]
    getattr(importlib.import_module(module), kernel)[grid](*tensors, **options)
    results = [jnp.asarray(o) for o in outs]
    return results if many else results[0]


def attention(call: Call, **options) -> np.ndarray:
    """paged_attention of the call on the interpreted backend, f32 [T, H, D]."""
    q, cache, *rest = call.args
    return run(q, as_on_a_gpu(cache), *rest, **options)


def run(q, cache, layer, table, lens, cu, *, scale=None, soft_cap=None, window=None, sinks=None, max_q_len=None):
    """paged_attention's arguments -> f32 [T, H, D]."""
    case = _checked(q, cache, table, lens, cu, scale, soft_cap, window, sinks, max_q_len)
    window = None if case.window == "none" else jnp.asarray(window, jnp.int32)
    lens, cu = jnp.asarray(lens), jnp.asarray(cu)
    out = backend.paged_attention_triton(q, cache, jnp.asarray(layer), table, lens, cu, window, sinks, case)
    return np.asarray(out).astype(np.float32)
