"""PyTorch node by node: the textbook recurrence in torch operations, every node's state stored.

o = S'^T q from the updated state, as published model code writes it (arXiv 2412.06464), with no
kernel of this project. One group of operations per node: the slowest and plainest row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lumotree.ops.gdn import Geometry, Operands, Path
from lumotree.tree import TreeDescriptor
from lumotree.verifiers.base import Verifier, by_value_head


class TorchNode(Verifier):
    name = "torch-node"
    title = "PyTorch node by node"
    policy = "float32 torch operations per node, output read from the updated state"

    def __init__(
        self, tree: TreeDescriptor, geometry: Geometry, device: torch.device, *options
    ) -> None:
        super().__init__(tree, geometry, device, *options)
        g = geometry
        self.states = self.buffer("node states", (g.layers, self.rows, g.heads, g.dk, g.dv))

    def verify(self, layer: int, recurrent: Tensor, operands: Operands) -> Tensor:
        heads = self.geometry.heads
        query, key = (by_value_head(x, heads) for x in (operands.query, operands.key))
        value = operands.value.float()
        outs = []
        for row, parent in enumerate(self.tree.parents):
            before = recurrent[layer] if parent < 0 else self.states[layer, parent]
            k, q = key[:, row, :, None], query[:, row, :, None]
            state = before * operands.decay[row, :, None, None]
            delta = (value[row] - (state * k).sum(-2)) * operands.beta[row, :, None]
            state = state + k * delta[:, None, :]
            self.states[layer, row].copy_(state)
            outs.append((state * q).sum(-2))
        return torch.stack(outs)

    def publish(self, recurrent: Tensor, path: Path) -> None:
        torch.index_select(self.states, 1, path.last(), out=recurrent.unsqueeze(1))
