"""Native path: the native update at every node, every node's state stored.

What servers do for trees on hybrid models: one state slot a node and layer, publication is a
copy of the accepted node's slot. Equations: lumotree.ops.reference (delta_*).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lumotree.ops.gdn import Geometry, Operands, Path
from lumotree.ops.table import has_kernels
from lumotree.tree import TreeDescriptor
from lumotree.verifiers.base import Verifier
from lumotree.verifiers.path_scan import node_states


class NativePath(Verifier):
    name = "native-path"
    title = "native path (store every node)"
    policy = "float32 native update per node; publication copies the node's stored state"
    exact = True

    def __init__(
        self, tree: TreeDescriptor, geometry: Geometry, device: torch.device, *options, launch=None
    ) -> None:
        super().__init__(tree, geometry, device, *options)
        g = geometry
        self.states = self.buffer("node states", (g.layers, self.rows, g.heads, g.dk, g.dv))
        self.kernels = None
        if has_kernels(self.device):
            from lumotree.ops.gdn_triton import GdnKernels, choose

            launch = launch or choose(geometry, self.device)
            self.kernels = GdnKernels(tree, geometry, self.device, launch.storing())

    def verify(self, layer: int, recurrent: Tensor, operands: Operands) -> Tensor:
        if self.kernels is None:
            out, states = node_states(self.tree, recurrent[layer], operands)
            self.states[layer].copy_(states)
            return out
        g = self.geometry
        out = recurrent.new_empty(self.rows, g.heads, g.dv)
        self.kernels.scan(recurrent[layer], operands, out, self.states[layer])
        return out

    def publish(self, recurrent: Tensor, path: Path) -> None:
        torch.index_select(self.states, 1, path.last(), out=recurrent.unsqueeze(1))
