"""Weights in 8 bits for drafts: half the bytes of bfloat16, and no token of the answer changes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

KIND = torch.float8_e4m3fn
LARGEST = torch.finfo(KIND).max
# Rows that are turned at a time: float32 copies of an output head would take gigabytes.
BLOCK = 16384


class Scaled(NamedTuple):
    """A weight [N, K]: values float8_e4m3fn [N, K] times scale float32 [N], row by row."""

    values: Tensor
    scale: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Scaled:
        """The nearest to a weight [N, K]; each row's largest element takes the largest value."""
        values = torch.empty(weight.shape, dtype=KIND, device=weight.device)
        scale = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
        for start in range(0, len(weight), BLOCK):
            block = weight[start : start + BLOCK].float()
            here = block.abs().amax(1).clamp_min_(torch.finfo(torch.float32).tiny) / LARGEST
            scale[start : start + BLOCK] = here
            values[start : start + BLOCK] = (block / here[:, None]).to(KIND)
        return cls(values, scale)

    def wide(self, dtype: torch.dtype) -> Tensor:
        """[N, K] in dtype."""
        out = torch.empty(self.shape, dtype=dtype, device=self.values.device)
        for start in range(0, len(out), BLOCK):
            values, scale = (part[start : start + BLOCK] for part in self)
            out[start : start + BLOCK] = values.float() * scale[:, None]
        return out

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def first(self, outputs: int) -> Scaled:
        return Scaled(self.values[:outputs], self.scale[:outputs])
