"""TreeWY: the solve of one step carries the commit of the step before.

Verification first applies the pending compact factors of the last accepted path to the state,
S = e^{c_n} S + sum_j e^{c_n - c_j} k_j u_j^T, and then solves its own tree from the result
(equations: lumotree.verifiers.compact). Publication only gathers the accepted rows' factors;
`flush` applies the last ones when no verification follows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lumotree.ops.gdn import Geometry, Operands, Path
from lumotree.tree import TreeDescriptor
from lumotree.verifiers import compact
from lumotree.verifiers.weaver import Weaver


class TreeWY(Weaver):
    name = "tree-wy"
    title = "TreeWY"
    policy = (
        "as Weaver; the commit multiplies bfloat16 pseudo-values and is fused with the next "
        "verification"
    )
    pending = True

    def __init__(
        self, tree: TreeDescriptor, geometry: Geometry, device: torch.device, *options
    ) -> None:
        super().__init__(tree, geometry, device, *options)
        g, lead = geometry, (geometry.layers, max(tree.depth) + 1)
        self.commit = compact.Factors(
            key=self.buffer("commit keys", (*lead, g.key_heads, g.dk), torch.bfloat16),
            u=self.buffer("commit pseudo-values", (*lead, g.heads, g.dv), torch.bfloat16),
            decay=self.buffer("commit decays", (*lead, g.heads)),
        )
        self.forget()

    def forget(self) -> None:
        """The commit becomes one that changes nothing."""
        self.commit.key.zero_()
        self.commit.u.zero_()
        self.commit.decay.fill_(1.0)

    def verify(self, layer: int, recurrent: Tensor, operands: Operands) -> Tensor:
        if self.kernel is not None:
            return self.kernel.solve(
                recurrent[layer], operands, self.factors, layer, commit=self.commit
            )
        part = slice(layer, layer + 1)
        c = self.commit
        compact.fused_update(recurrent[part], c.key[part], c.u[part], c.decay[part])
        return super().verify(layer, recurrent, operands)

    def publish(self, recurrent: Tensor, path: Path) -> None:
        key, u, decay = self.factors.of_path(path)
        self.commit.key.copy_(key)
        self.commit.u.copy_(u)
        self.commit.decay.copy_(decay)

    def flush(self, recurrent: Tensor) -> None:
        c = self.commit
        if self.kernel is not None:
            self.kernel.update(recurrent, c)
        else:
            compact.fused_update(recurrent, c.key, c.u, c.decay)
        self.forget()
