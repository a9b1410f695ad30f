"""Weaver: one ancestor-masked triangular solve (I + A) U = rhs per layer, then a short replay.

Equations: lumotree.verifiers.compact. U is kept; publication runs S = decay S + k u^T over the
accepted rows alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lumotree.ops.gdn import Geometry, Operands, Path
from lumotree.ops.table import has_kernels
from lumotree.tree import TreeDescriptor
from lumotree.verifiers import compact
from lumotree.verifiers.base import Verifier


class Solving(Verifier):
    """A verifier that keeps the factors (k, u, decay) of every row."""

    low = True
    u_dtype = torch.bfloat16
    # Columns of a tile and warps of a program of the fused kernel, as measured best.
    block, warps = 64, 4

    def __init__(
        self, tree: TreeDescriptor, geometry: Geometry, device: torch.device, *options
    ) -> None:
        super().__init__(tree, geometry, device, *options)
        g, lead = geometry, (geometry.layers, self.rows)
        key_dtype = torch.bfloat16 if self.low else torch.float32
        self.factors = compact.Factors(
            key=self.buffer("keys", (*lead, g.key_heads, g.dk), key_dtype),
            u=self.buffer("pseudo-values", (*lead, g.heads, g.dv), self.u_dtype),
            decay=self.buffer("decays", (*lead, g.heads)),
        )
        self.mask = compact.ancestor_mask(tree, self.device)
        self.kernel = None
        if self.low and has_kernels(self.device):
            from lumotree.ops.solve_triton import SolveKernels

            self.kernel = SolveKernels(geometry, self.mask, self.block, self.warps)

    def solve(self, system: compact.System) -> Tensor:
        """U [heads, rows, dv]."""
        raise NotImplementedError

    def verify(self, layer: int, recurrent: Tensor, operands: Operands) -> Tensor:
        if self.kernel is not None:
            return self.kernel.solve(recurrent[layer], operands, self.factors, layer)
        system = compact.prepare(recurrent[layer], operands, self.mask, self.low)
        u = self.solve(system)
        self.factors.record(layer, operands, u.transpose(0, 1))
        return compact.outputs(system, u)


class Weaver(Solving):
    name = "weaver"
    title = "Weaver"
    policy = (
        "operands of products, the state among them, rounded to bfloat16, float32 sums; "
        "bfloat16 pseudo-values"
    )
    tolerance = (2e-2, 5e-2)

    def solve(self, system: compact.System) -> Tensor:
        return torch.linalg.solve_triangular(
            system.system, system.rhs, upper=False, unitriangular=True
        )

    def publish(self, recurrent: Tensor, path: Path) -> None:
        if self.kernel is not None:
            self.kernel.replay(recurrent, self.factors, path)
        else:
            compact.replay_rows(recurrent, *self.factors.of_path(path))


class WeaverFp32(Weaver):
    name = "weaver-fp32"
    title = "Weaver, fp32 preparation"
    policy = "float32 operands, products and pseudo-values; batched torch products"
    tolerance = (1e-5, 1e-4)
    low = False
    u_dtype = torch.float32
