"""Triton's interpreter with the arithmetic of a device, where it deviates from one.

It multiplies the bit patterns of bfloat16 as integers and truncates where a device rounds to the
nearest; and a float32 product of numpy may give a row other bits than its neighbours, which the
float64 product here, rounded once, does not.
"""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def _float64(handle: interpreter.TensorHandle) -> np.ndarray:
    if handle.dtype.scalar == tl.bfloat16:
        bits = np.ascontiguousarray(handle.data).astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64)
    return handle.data.astype(np.float64)


def _dot(builder, a, b, d, input_precision, max_num_imprecise_acc):
    product = np.matmul(_float64(a), _float64(b))
    return interpreter.TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)


def _truncate(builder, source, target):
    if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16)
        bits = rounded.view(torch.int16).numpy().view(np.uint16)
        return interpreter.TensorHandle(bits.reshape(source.data.shape), tl.bfloat16)
    return builder.cast_impl(source, target)


def install() -> None:
    """Puts the products and roundings above in place of the interpreter's own."""
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter.InterpreterBuilder.create_fp_trunc = _truncate
