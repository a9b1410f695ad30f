"""Random operands and states for component runs, and what they should give."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lumotree.ops.gdn import Geometry, Operands
from lumotree.ops.table import has_kernels
from lumotree.tree import TreeDescriptor


def random_operands(geometry: Geometry, rows: int, device: torch.device, seed: int) -> Operands:
    """One layer's operands, of the sizes a trained layer gives: unit keys, values of unit size,
    decays mostly near 1 and some near 0, rates over all of (0, 1). Same on every device."""
    g = geometry
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    query, key = (F.normalize(normal(rows, g.key_heads, g.dk), dim=-1) for _ in range(2))
    query *= g.dk**-0.5
    # g = -exp(A_log) softplus(a + dt_bias), A in (0, 16) as published models initialise it.
    rate = 16 * torch.rand(g.heads, generator=generator)
    decay = (-rate * F.softplus(normal(rows, g.heads) - 4)).exp()
    beta = torch.sigmoid(normal(rows, g.heads)).bfloat16().float()
    value = normal(rows, g.heads, g.dv).bfloat16()
    overlap = (query * key).sum(-1)
    return Operands(query, key, value, decay, beta, overlap).map(lambda x: x.to(device))


def random_states(geometry: Geometry, device: torch.device, seed: int) -> Tensor:
    """Pre-tree states of every layer, float32 [layers, heads, dk, dv]: written by 2 dk tokens of
    unit values, their entries are about this large."""
    g = geometry
    generator = torch.Generator().manual_seed(seed)
    one = torch.randn(g.heads, g.dk, g.dv, generator=generator) * g.dk**-0.5
    # Layers are rotations of one draw: 144 MiB of random numbers take seconds on a host.
    shifts = [one.roll(layer, dims=1) for layer in range(g.layers)]
    return torch.stack(shifts).to(device)


def float64_rows(tree: TreeDescriptor, state: Tensor, operands: Operands) -> tuple[Tensor, Tensor]:
    """Outputs [rows, heads, dv] and states [rows, heads, dk, dv] of one layer, in float64.

    S' = decay S + k d^T with d = beta (v - decay S^T k), o = S'^T q, row by row: nothing shared
    with the code under test.
    """
    repeat = state.shape[0] // operands.key.shape[1]
    wide = operands.map(lambda x: x.double())
    query, key = (x.repeat_interleave(repeat, 1) for x in (wide.query, wide.key))
    states = torch.empty(len(tree), *state.shape, dtype=torch.float64, device=state.device)
    outs = []
    for row, parent in enumerate(tree.parents):
        before = state.double() if parent < 0 else states[parent]
        fallen = before * wide.decay[row, :, None, None]
        missing = wide.value[row] - torch.einsum("hkv,hk->hv", fallen, key[row])
        delta = wide.beta[row, :, None] * missing
        states[row] = fallen + key[row, :, :, None] * delta[:, None, :]
        outs.append(torch.einsum("hkv,hk->hv", states[row], query[row]))
    return torch.stack(outs), states


def native_rows(
    tree: TreeDescriptor, geometry: Geometry, state: Tensor, operands: Operands, launch=None
) -> tuple[Tensor, Tensor]:
    """What native decoding gives: one token at a time, its state written to memory and read back.

    Outputs [rows, heads, dv] and states [rows, heads, dk, dv] of one layer, float32.
    """
    from lumotree.ops.gdn import Path
    from lumotree.verifiers.path_scan import update_rows

    states = state.new_empty(len(tree), *state.shape)
    out = state.new_empty(len(tree), geometry.heads, geometry.dv)
    kernels = None
    if has_kernels(state.device):
        from lumotree.ops.gdn_triton import GdnKernels

        kernels = GdnKernels(tree, geometry, state.device, launch)
    for row, parent in enumerate(tree.parents):
        states[row].copy_(state if parent < 0 else states[parent])
        if kernels is None:
            out[row : row + 1], states[row : row + 1] = update_rows(
                states[row : row + 1].clone(), operands, [row]
            )
        else:
            kernels.update(states[row], operands, Path.of(tree, (row,), state.device), out)
    return out, states
