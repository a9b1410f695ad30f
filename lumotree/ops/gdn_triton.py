"""Launches of the GDN kernels: block choice, schedules on the device, scan, update, replay."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lumotree.ops.device import limits_of
from lumotree.ops.gdn import Geometry, Operands, Path
from lumotree.ops.gdn_kernels import scan_kernel, update_kernel
from lumotree.ops.gdn_schedule import plan
from lumotree.tree import TreeDescriptor

WARP = 32
# A thread has at most 255 registers; beside the tile it holds two vectors and addresses.
TILE_REGISTERS = 128
# Measured (results/h200/gdn.md): (dk, dv, value heads) -> (BV, schedule). Others get the fallback
# of `choose`.
TABLE: dict[tuple[int, int, int], tuple[int, str]] = {(128, 128, 48): (32, "split")}


@dataclass(frozen=True)
class Launch:
    """How the kernels run: columns of a tile, schedule, contraction in reductions, early start.

    All kernels of a state must share `block`, `warps` and `fusion`: they decide the bits.
    early: a scan may start before the kernel in front of it ends (programmatic dependent
    launch). It then reads the state first, so the state must be older than that kernel.
    """

    block: int
    schedule: str = "split"
    fusion: bool = True
    early: bool = False
    warps: int = 1

    def storing(self) -> Launch:
        """The same bits, with every row's state stored: the native path baseline."""
        return replace(self, schedule="store")


def choose(geometry: Geometry, device: torch.device) -> Launch:
    """The launch for a geometry on this device: from the table, else the widest tile that fits.

    One warp a program; a tile may take half of a thread's registers, and a multiprocessor must
    hold two programs (its register count is read from the device).
    """
    block, schedule = TABLE.get((geometry.dk, geometry.dv, geometry.heads), (32, "split"))
    block = min(block, 1 << (geometry.dv.bit_length() - 1))
    registers = limits_of(device).registers
    while block > 2 and (
        geometry.dk * block > TILE_REGISTERS * WARP
        or 4 * geometry.dk * block > registers
        or geometry.dv % block
    ):
        block //= 2
    return Launch(block, schedule)


class GdnKernels:
    """Kernels of one tree and geometry on one device; holds the schedule's tables.

    seats: int32 [R] on the device, for R requests at once (lumotree.ops.seats). States then have
    N seats in front at any stride, operands R * rows rows, cut states and paths R in front.
    """

    def __init__(
        self,
        tree: TreeDescriptor,
        geometry: Geometry,
        device: torch.device,
        launch: Launch | None = None,
        seats: Tensor | None = None,
    ) -> None:
        self.geometry, self.rows, self.seats = geometry, len(tree), seats
        self.requests = 1 if seats is None else seats.numel()
        self.launch = launch or choose(geometry, device)
        self.schedule = plan(tree, self.launch.schedule)
        walks, visits = self.schedule.tables()
        self.walks = torch.tensor(walks, dtype=torch.int32, device=device)
        self.visits = torch.tensor(visits, dtype=torch.int32, device=device)
        self.tiles = geometry.heads * geometry.dv // self.launch.block
        self.shape = dict(
            HEADS=geometry.heads,
            KEY_HEADS=geometry.key_heads,
            DK=geometry.dk,
            DV=geometry.dv,
            BV=self.launch.block,
        )
        self.options = dict(
            num_warps=self.launch.warps, num_stages=1, enable_fp_fusion=self.launch.fusion
        )

    def scan(self, state: Tensor, operands: Operands, out: Tensor, cuts: Tensor | None) -> None:
        """Outputs of all rows from the pre-tree state [heads, dk, dv], which is only read.

        cuts float32 [schedule.cuts, heads, dk, dv], None when the schedule hands nothing over.
        With seats: state [N, heads, dk, dv], cuts [R, ...], out [R * rows, heads, dv].
        """
        o, seated = operands, self.seats is not None
        first = 0
        early = {"launch_pdl": True} if self.launch.early else {}
        for walks in self.schedule.launches:
            scan_kernel[(self.tiles, len(walks), self.requests)](
                state,
                state if cuts is None else cuts,
                o.query,
                o.key,
                o.value,
                o.decay,
                o.beta,
                o.overlap,
                out,
                self.walks,
                self.visits,
                first,
                self.seats,
                state.stride(0) if seated else None,
                cuts.stride(0) if seated and cuts is not None else None,
                self.rows,
                **self.shape,
                CUT=self.schedule.cuts > 0,
                PDL=self.launch.early,
                **self.options,
                **early,
            )
            first += len(walks)

    def update(self, state: Tensor, operands: Operands, path: Path, out: Tensor) -> None:
        """The native update of one layer's state [heads, dk, dv] along `path`, with outputs.

        With seats: state [N, heads, dk, dv], out [R * rows, heads, dv], path [R, ...].
        """
        self._update(state, operands, path, out, layers=1, read=True)

    def replay(self, states: Tensor, records: Operands, path: Path) -> None:
        """All layers' states [layers, heads, dk, dv] in place along `path`, one launch.

        records: key, value, decay, beta as in Operands with layers in front, contiguous. With
        seats: states [N, layers, ...], records [layers, R * rows, ...], path [R, ...].
        """
        self._update(states, records, path, states, layers=states.shape[-4], read=False)

    def _update(
        self, state: Tensor, o: Operands, path: Path, out: Tensor, layers: int, read: bool
    ) -> None:
        seated = self.seats is not None
        update_kernel[(self.tiles, layers, self.requests)](
            state,
            o.query,
            o.key,
            o.value,
            o.decay,
            o.beta,
            o.overlap,
            out,
            path.rows,
            path.count,
            o.key.shape[-3],
            self.seats,
            state.stride(0) if seated else None,
            path.rows.stride(0) if seated else None,
            path.count.stride(0) if seated else None,
            self.rows,
            **self.shape,
            READ=read,
            **self.options,
        )
