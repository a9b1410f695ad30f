"""The table of functions that layers call: torch definitions everywhere, Triton kernels on CUDA."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from lumotree.ops import reference
from lumotree.ops.reference import Norm


class Table(Protocol):
    """Matrix products and norms of [n, width] rows in the model dtype; see ops.reference."""

    def pack(self, weight: Tensor) -> Tensor:
        """[out, in] weight of a checkpoint -> what the products below take."""

    def first(self, packed: Tensor, outputs: int) -> Tensor:
        """The first outputs of a packed weight alone, sharing its memory."""

    def narrow_weight(self, packed: Tensor) -> Any:
        """A packed weight in 8 bits, for steps alone: not for a prompt's many rows."""

    def linear(self, x: Tensor, packed: Tensor) -> Tensor: ...

    def linear_swiglu(self, x: Tensor, packed: Tensor) -> Tensor: ...

    def linear_add_norm(
        self, residual: Tensor, x: Tensor, packed: Tensor, norm: Norm
    ) -> tuple[Tensor, Tensor]: ...

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor: ...


def has_kernels(device: torch.device) -> bool:
    """Whether Triton kernels serve this device: a GPU, or any when interpreted."""
    try:
        import triton
    except ImportError:
        return False
    return device.type == "cuda" or bool(triton.knobs.runtime.interpret)


def table_for(device: torch.device) -> Table:
    """The functions for a device."""
    if not has_kernels(device):
        return reference
    from lumotree.ops import fused

    return fused
