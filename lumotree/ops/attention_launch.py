"""Sizes of the attention kernels, chosen from the limits of a device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lumotree.ops.device import limits_of


@dataclass(frozen=True)
class Launch:
    """Sizes of the attention kernels. `chunk` and `block` decide the bits: one pair per device.

    chunk, block: keys of a partial result and of a step of its online softmax. tile, warps,
    stages: queries, warps and loads in flight of a prefix program; 16 queries a warp keep the
    instruction shape, so a wider tile changes no bit. row_tile, row_warps, row_stages: the same
    for a row's tail. programs: how many run at once (the multiprocessors of the device). tma:
    blocks are loaded through tensor descriptors. early: kernels may start before the one in front
    ends (programmatic dependent launch).
    """

    chunk: int = 512
    block: int = 64
    tile: int = 64
    warps: int = 4
    stages: int = 2
    row_tile: int = 64
    row_warps: int = 4
    row_stages: int = 2
    programs: int = 132
    tma: bool = False
    early: bool = False

    def shared_bytes(self, head_dim: int, itemsize: int) -> int:
        """The most a program keeps in shared memory: its queries, and a block for every stage."""
        prefix = self.tile + 2 * self.stages * self.block
        row = self.row_tile + 2 * self.row_stages * self.block
        return head_dim * itemsize * max(prefix, row)


def choose(head_dim: int, dtype: torch.dtype, device: torch.device) -> Launch:
    """The launch for a head size; limits are read from the device.

    Stages go first when shared memory is short, then the block.
    """
    limits = limits_of(device)
    new = limits.early_start
    launch = Launch(stages=3, programs=limits.processors, early=new, tma=new)
    while launch.shared_bytes(head_dim, dtype.itemsize) > limits.shared and launch.block > 16:
        if launch.stages > 1:
            stages = launch.stages - 1
            launch = replace(launch, stages=stages, row_stages=min(stages, launch.row_stages))
        else:
            launch = replace(launch, block=launch.block // 2)
    return launch
