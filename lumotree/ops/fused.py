"""The table of functions on a device with Triton kernels; see lumotree.ops.table.

Steps of decoding have few rows and run in the skinny products of lumotree.ops.linear; runs of
prompt tokens have many and go to the vendor's matrix product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lumotree.errors import LumoTreeError
from lumotree.ops import linear as skinny
from lumotree.ops import prefill
from lumotree.ops.device import limits_of
from lumotree.ops.eight_bits import Scaled
from lumotree.ops.linear import Weight, pack, rms_norm
from lumotree.ops.reference import Norm

__all__ = [
    "first", "linear", "linear_add_norm", "linear_swiglu", "narrow_weight", "pack", "rms_norm",
]  # fmt: skip


def first(packed: Weight, outputs: int) -> Weight:
    return packed.first(outputs) if isinstance(packed, Scaled) else packed[:outputs]


def narrow_weight(packed: Tensor) -> Scaled:
    device = packed.device
    if device.type == "cuda" and limits_of(device).capability < (8, 9):
        raise LumoTreeError(
            f"{torch.cuda.get_device_name(device)} has no 8-bit floats (compute capability 8.9)",
            "leave draft_weights=fp8 out",
        )
    return Scaled.of(packed)


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
