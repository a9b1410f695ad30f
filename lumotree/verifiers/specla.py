"""SpecLA: every root-to-leaf chain solved as a chain, factors buffered, one later fused update.

Chains of linear attention are verified side by side, each with the causal system of its own
rows (the equations of lumotree.verifiers.compact with "earlier in the chain" for "ancestor");
rows that chains share are solved in each, as batched torch products on every device. Accepting
a prefix applies its buffered factors to the state as one product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lumotree.ops.gdn import Geometry, Operands, Path
from lumotree.tree import TreeDescriptor
from lumotree.verifiers import compact
from lumotree.verifiers.weaver import Solving


class SpecLA(Solving):
    name = "specla"
    title = "SpecLA"
    policy = (
        "float32 operands, products and factors, one causal system per chain; batched torch "
        "products"
    )
    low = False
    u_dtype = torch.float32

    def __init__(
        self, tree: TreeDescriptor, geometry: Geometry, device: torch.device, *options
    ) -> None:
        super().__init__(tree, geometry, device, *options)
        leaves = [row for row in range(len(tree)) if not tree.children[row]]
        chains = [tree.root_paths[leaf] for leaf in leaves]
        length = max(map(len, chains))
        self.chains = len(chains)
        # Chains are padded with their leaf; the copies are solved and never read.
        padded = [[*chain, *[chain[-1]] * (length - len(chain))] for chain in chains]
        self.gather = torch.tensor(padded, device=self.device).flatten()
        place = {}
        for c, chain in enumerate(chains):
            for t, row in enumerate(chain):
                place.setdefault(row, c * length + t)
        self.owner = torch.tensor([place[row] for row in range(len(tree))], device=self.device)
        self.causal = torch.ones(length, length, dtype=torch.bool, device=self.device).tril()

    def verify(self, layer: int, recurrent: Tensor, operands: Operands) -> Tensor:
        g, state = self.geometry, recurrent[layer]

        def as_chain_heads(x: Tensor) -> Tensor:
            """[rows, h, ...] -> [length, chains * h, ...]: a head of a chain is a head."""
            x = x.index_select(0, self.gather).unflatten(0, (self.chains, -1))
            return x.transpose(0, 1).flatten(1, 2)

        chains = operands.map(as_chain_heads)
        states = state.repeat(self.chains, 1, 1)
        system = compact.prepare(states, chains, self.causal, self.low)
        u = torch.linalg.solve_triangular(
            system.system, system.rhs, upper=False, unitriangular=True
        )

        def owned(x: Tensor) -> Tensor:
            """[length, chains * heads, dv] -> [rows, heads, dv]."""
            by_chain = x.unflatten(1, (self.chains, g.heads)).transpose(0, 1).flatten(0, 1)
            return by_chain.index_select(0, self.owner)

        self.factors.record(layer, operands, owned(u.transpose(0, 1)))
        return owned(compact.outputs(system, u))

    def publish(self, recurrent: Tensor, path: Path) -> None:
        compact.fused_update(recurrent, *self.factors.of_path(path))
