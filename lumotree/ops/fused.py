"""The table of functions on a device with Triton kernels; see lumotree.ops.table.

Steps of decoding have few rows and run in the skinny products of lumotree.ops.linear; runs of
prompt tokens have many and go to the vendor's matrix product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lumotree.ops import linear as skinny
from lumotree.ops import prefill
from lumotree.ops.linear import pack, rms_norm
from lumotree.ops.reference import Norm

__all__ = ["first", "linear", "linear_add_norm", "linear_swiglu", "pack", "rms_norm"]


def first(packed: Tensor, outputs: int) -> Tensor:
    return packed[:outputs]


def linear(x: Tensor, packed: Tensor) -> Tensor:
    if x.shape[0] <= skinny.MAX_STEP_ROWS:
        return skinny.linear(x, packed)
    return torch.mm(x, packed.t())


def linear_swiglu(x: Tensor, packed: Tensor) -> Tensor:
    if x.shape[0] <= skinny.MAX_STEP_ROWS:
        return skinny.linear_swiglu(x, packed)
    return prefill.swiglu(torch.mm(x, packed.t()))


def linear_add_norm(
    residual: Tensor, x: Tensor, packed: Tensor, norm: Norm
) -> tuple[Tensor, Tensor]:
    if x.shape[0] <= skinny.MAX_STEP_ROWS:
        return skinny.linear_add_norm(residual, x, packed, norm)
    total = torch.addmm(residual, x, packed.t())
    return total, rms_norm(total, norm)
