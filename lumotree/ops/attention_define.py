"""What the attention kernels compute, in plain torch: their definitions, row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from lumotree.ops import reference as ops
from lumotree.ops.attention import TreeAttention


def prepare_rows(
    attention: TreeAttention,
    projected: Tensor,
    norm: ops.Norm,
    rope: Tensor,
    partner: Tensor,
    length: int,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Definition of `TreeAttention.prepare`."""
    a = attention
    heads, d, n = a.heads + a.kv_heads, a.head_dim, a.count
    qk, v, _ = projected.split_with_sizes((heads * d, a.kv_heads * d, a.heads * d), -1)
    qk = ops.rms_norm(qk.view(a.padded, heads, d), norm)
    angles = ops.rope_angles(rope.index_select(0, a.depth + length))
    q, k = ops.rope(qk, angles, partner).split_with_sizes((a.heads, a.kv_heads), 1)
    slots = a.slots[:n].long() + length
    keys[:, slots] = k[:n].transpose(0, 1)
    v = v.view(a.padded, a.kv_heads, d)[:n]
    values[:, slots] = v.transpose(0, 1).nan_to_num(0.0, 0.0, 0.0)
    return q


def attend_rows(
    attention: TreeAttention,
    q: Tensor,
    projected: Tensor,
    keys: Tensor,
    values: Tensor,
    length: int,
    first: int = 0,
) -> Tensor:
    """Definition of `TreeAttention.attend`, softmax row by row in q's dtype (float64 to compare).

    Padding rows get zeros.
    """
    a = attention
    out = q.new_zeros(a.padded, a.heads, a.head_dim)
    for row in range(a.count):
        steps = a.path[row, : int(a.depth[row]) + 1].long() + length
        slots = torch.cat((torch.arange(first, length, device=q.device), steps))
        k, v = (x[:, slots].to(q.dtype).repeat_interleave(a.group, 0) for x in (keys, values))
        weights = torch.softmax((k @ q[row][..., None])[..., 0], -1)
        out[row] = (weights[:, None] @ v)[:, 0]
    gate = projected[:, -a.heads * a.head_dim :]
    return ops.narrow(out, gate.dtype).flatten(1) * torch.sigmoid(gate)


def move_rows(
    attention: TreeAttention, keys: Tensor, values: Tensor, path: list[int], length: int
) -> None:
    """Definition of `TreeAttention.move`."""
    source = attention.slots[path].long() + length
    for side in (keys, values):
        side[:, :, length : length + len(path)] = side[:, :, source]
