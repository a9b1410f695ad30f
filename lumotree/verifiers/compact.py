"""The compact (WY) form of a tree of gated delta updates, shared by the solving verifiers.

With c_i the sum of log decays from the root to row i, and j an ancestor of i,
  S_i = e^{c_i} S_0 + sum_{j <= i} e^{c_i - c_j} k_j u_j^T,
  u_i = beta_i (v_i - e^{c_i} S_0^T k_i - sum_{j < i} e^{c_i - c_j} (k_j . k_i) u_j),
  o_i = e^{c_i} S_0^T q_i + sum_{j <= i} e^{c_i - c_j} (k_j . q_i) u_j.
So U solves (I + A) U = rhs with A strictly lower triangular, A_ij = beta_i e^{c_i - c_j} k_i . k_j
on ancestors, and everything that reads S_0 is one matrix product per layer. (Gated delta rule in
WY form: arXiv 2412.06464; ancestors instead of earlier tokens: what these verifiers add.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lumotree.ops.gdn import Operands, Path
from lumotree.tree import TreeDescriptor
from lumotree.verifiers.base import by_value_head


def ancestor_mask(tree: TreeDescriptor, device: torch.device) -> Tensor:
    """bool [rows, rows]: j is on the root path of i, i itself included."""
    mask = torch.zeros(len(tree), len(tree), dtype=torch.bool)
    for row, path in enumerate(tree.root_paths):
        mask[row, list(path)] = True
    return mask.to(device)


@dataclass(frozen=True)
class System:
    """(I + system) U = rhs of one layer, and how outputs follow: base + read U.

    key [heads, rows, dk]; system, read [heads, rows, rows]; rhs, base [heads, rows, dv].
    """

    key: Tensor
    system: Tensor
    read: Tensor
    rhs: Tensor
    base: Tensor


def rounded(x: Tensor, low: bool) -> Tensor:
    """x in float32, through bfloat16 if `low`: an operand of a product of that precision."""
    return x.bfloat16().float() if low else x.float()


def prepare(state: Tensor, operands: Operands, mask: Tensor, low: bool) -> System:
    """The system of one layer; `mask` is `ancestor_mask`, state [heads, dk, dv].

    low: operands of every product, the state among them, are rounded to bfloat16.
    """
    heads = state.shape[0]
    query, key = (rounded(by_value_head(x, heads), low) for x in (operands.query, operands.key))
    beta = operands.beta.t()[..., None]
    total = (mask.float() @ operands.decay.log()).t()
    fall = (total[:, :, None] - total[:, None, :]).masked_fill(~mask, float("-inf")).exp()
    overlap = fall * (key @ key.transpose(1, 2))
    whole = total.exp()[..., None]
    held = rounded(state, low)
    return System(
        key=key,
        system=(beta * overlap).tril(-1),
        read=fall * (query @ key.transpose(1, 2)),
        rhs=beta * (operands.value.float().transpose(0, 1) - whole * (key @ held)),
        base=whole * (query @ held),
    )


def outputs(system: System, solution: Tensor) -> Tensor:
    """[rows, heads, dv]."""
    return (system.base + system.read @ solution).transpose(0, 1)


@dataclass(frozen=True)
class Factors:
    """Of every layer and row: key [.., key heads, dk], u [.., heads, dv], decay [.., heads]."""

    key: Tensor
    u: Tensor
    decay: Tensor

    def record(self, layer: int, operands: Operands, u: Tensor) -> None:
        self.key[layer].copy_(operands.key)
        self.decay[layer].copy_(operands.decay)
        self.u[layer].copy_(u)

    def of_path(self, path: Path) -> tuple[Tensor, Tensor, Tensor]:
        """The factors of the accepted rows, [layers, length, ...]; a padded row changes nothing."""
        rows = path.rows[: path.length].long()
        live = path.live()
        key, u, decay = (x.index_select(1, rows) for x in (self.key, self.u, self.decay))
        u = torch.where(live[:, None, None], u, torch.zeros_like(u))
        return key, u, torch.where(live[:, None], decay, torch.ones_like(decay))


def replay_rows(recurrent: Tensor, key: Tensor, u: Tensor, decay: Tensor) -> None:
    """S = decay S + k u^T, row after row, every layer at once, in place.

    recurrent [layers, heads, dk, dv]; key [layers, length, key heads, dk], u, decay likewise.
    """
    repeat = recurrent.shape[1] // key.shape[2]
    for i in range(key.shape[1]):
        k = key[:, i].float().repeat_interleave(repeat, 1)
        recurrent.mul_(decay[:, i, :, None, None]).addcmul_(k[..., None], u[:, i, :, None].float())


def fused_update(recurrent: Tensor, key: Tensor, u: Tensor, decay: Tensor) -> None:
    """S_n = e^{c_n} S_0 + sum_j e^{c_n - c_j} k_j u_j^T as one product, in place."""
    repeat = recurrent.shape[1] // key.shape[2]
    # Decay after row j: the suffix sum of logs, without j itself.
    logs = decay.log()
    after = logs.flip(1).cumsum(1).flip(1)
    weight = (after - logs).exp()
    k = key.float().repeat_interleave(repeat, 2) * weight[..., None]
    recurrent.mul_(after[:, 0].exp()[..., None, None])
    recurrent.add_(k.permute(0, 2, 3, 1) @ u.float().transpose(1, 2))
