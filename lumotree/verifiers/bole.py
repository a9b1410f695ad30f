"""Bole: the solve as a finite Neumann sum, then one fused update from the compact factors.

A is strictly lower triangular on ancestors, so A^(depth + 1) = 0 and
(I + A)^-1 rhs = sum_{m <= depth} (-A)^m rhs, evaluated as X <- rhs - A X, depth times.
Equations: lumotree.verifiers.compact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lumotree.ops.gdn import Path
from lumotree.verifiers import compact
from lumotree.verifiers.weaver import Solving


class Bole(Solving):
    name = "bole"
    title = "Bole"
    policy = "float32 operands, products and factors; finite Neumann sum; batched torch products"
    low = False
    u_dtype = torch.float32

    def solve(self, system: compact.System) -> Tensor:
        u = system.rhs
        for _ in range(max(self.tree.depth)):
            u = system.rhs - system.system @ u
        return u

    def publish(self, recurrent: Tensor, path: Path) -> None:
        compact.fused_update(recurrent, *self.factors.of_path(path))
