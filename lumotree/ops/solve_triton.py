"""Launches of the compact-form kernels for the verifiers that solve."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lumotree.ops.gdn import Geometry, Operands, Path
from lumotree.ops.solve_kernels import commit_kernel, solve_kernel

if TYPE_CHECKING:
    from lumotree.verifiers.compact import Factors


class SolveKernels:
    """Kernels of one ancestor mask (bool [rows, rows]) and geometry on one device.

    block, warps: columns of a tile and warps a program; nothing else depends on the device.
    """

    def __init__(
        self,
        geometry: Geometry,
        mask: Tensor,
        block: int = 64,
        warps: int = 8,
    ) -> None:
        self.geometry = geometry
        self.mask = mask.to(torch.int8).contiguous()
        self.rows = mask.shape[0]
        depth = int(mask.sum(1).max()) - 1
        self.block = min(block, geometry.dv)
        self.padded = max(16, 1 << (self.rows - 1).bit_length())
        self.depth = depth
        self.length = max(16, 1 << depth.bit_length())
        self.tiles = geometry.heads * geometry.dv // self.block
        self.options = dict(num_warps=warps, num_stages=1)
        self.shape = dict(
            HEADS=geometry.heads,
            KEY_HEADS=geometry.key_heads,
            DK=geometry.dk,
            DV=geometry.dv,
            LENGTH=self.length,
        )
        # Commit factors lie in path order, padded rows with decay 1 and u 0.
        self.in_order = Path(
            torch.arange(depth + 2, dtype=torch.int32, device=mask.device),
            torch.full((1,), depth + 1, dtype=torch.int32, device=mask.device),
        )

    def solve(
        self,
        state: Tensor,
        operands: Operands,
        factors: Factors,
        layer: int,
        commit: Factors | None = None,
    ) -> Tensor:
        """Outputs [rows, heads, dv]; records the layer's factors. `commit` is applied first."""
        o, g = operands, self.geometry
        out = state.new_empty(self.rows, g.heads, g.dv)
        pending = factors if commit is None else commit
        solve_kernel[(self.tiles,)](
            state,
            o.query,
            o.key,
            o.value,
            o.decay,
            o.beta,
            self.mask,
            out,
            factors.key[layer],
            factors.u[layer],
            factors.decay[layer],
            pending.key[layer],
            pending.u[layer],
            pending.decay[layer],
            self.in_order.rows,
            self.in_order.count,
            self.rows,
            BV=self.block,
            ROWS=self.padded,
            DEPTH=self.depth,
            COMMIT=commit is not None,
            **self.shape,
            **self.options,
        )
        return out

    def replay(self, states: Tensor, factors: Factors, path: Path) -> None:
        """S = decay S + k u^T along the path, all layers in place."""
        self._commit(states, factors, path, product=False)

    def update(self, states: Tensor, factors: Factors, path: Path | None = None) -> None:
        """The path's factors as one product, all layers in place; no path: factors in order."""
        self._commit(states, factors, path or self.in_order, product=True)

    def _commit(self, states: Tensor, factors: Factors, path: Path, product: bool) -> None:
        commit_kernel[(self.tiles, states.shape[0])](
            states,
            factors.key,
            factors.u,
            factors.decay,
            path.rows,
            path.count,
            factors.key.shape[1],
            BV=self.block,
            PRODUCT=product,
            **self.shape,
            **self.options,
        )
