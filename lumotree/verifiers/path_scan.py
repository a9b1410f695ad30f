"""LumoTree: path-parallel scan, then the native update replayed along the accepted path.

arXiv 2609.23900: rows of a path are visited in order, paths side by side, the state carried in
float32; nothing but the operands is kept, and publication runs the native single-token update
from the pre-tree state. Equations: lumotree.ops.reference (delta_*).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lumotree.ops import reference as ops
from lumotree.ops.gdn import Geometry, Operands, Path
from lumotree.ops.table import has_kernels
from lumotree.tree import TreeDescriptor
from lumotree.verifiers.base import Verifier


def update_rows(
    state: Tensor, operands: Operands, rows: list[int] | slice
) -> tuple[Tensor, Tensor]:
    """The native update of `rows` from `state` [n, heads, dk, dv]: outputs and states after.

    Rows are independent: a row's bits are those it has alone.
    """
    n, heads = state.shape[:2]
    part = operands.map(lambda x: x[rows])
    repeat = heads // part.key.shape[1]
    query_key = torch.stack((part.query, part.key), 2).float().repeat_interleave(repeat, 1)
    query_key = query_key.flatten(0, 1)
    decay, beta = part.decay.reshape(-1, 1, 1), part.beta.reshape(-1, 1)
    overlap = part.overlap.repeat_interleave(repeat, 1).reshape(-1, 1)
    before = state.flatten(0, 1)
    held = ops.delta_hold(before, query_key, decay)
    written = ops.delta_value(held, part.value.float().flatten(0, 1), beta)
    out = ops.delta_read(held, overlap, written)
    after = ops.delta_write(before, query_key, written, decay, out=torch.empty_like(before))
    return out.view(n, heads, -1), after.view(state.shape)


class OperandRing:
    """Operands that a replay needs, of every layer and row: key, value, decay, beta."""

    def __init__(self, verifier: Verifier, rows: int) -> None:
        g = verifier.geometry
        lead = (g.layers, rows)
        key = verifier.buffer("keys", (*lead, g.key_heads, g.dk))
        decay = verifier.buffer("decays", (*lead, g.heads))
        self.operands = Operands(
            # Nobody reads a replayed row's output: key and decay stand in for query and overlap.
            query=key,
            key=key,
            value=verifier.buffer("values", (*lead, g.heads, g.dv), verifier.value_dtype),
            decay=decay,
            beta=verifier.buffer("betas", (*lead, g.heads)),
            overlap=decay[..., : g.key_heads],
        )

    def layer(self, layer: int) -> Operands:
        return self.operands.map(lambda x: x[layer])


class PathScan(Verifier):
    """seats: int32 [R] on the device, for R requests at once (lumotree.ops.seats): recurrent
    states then have N seats in front, operands, ring and outputs R * rows rows, paths R in front.
    """

    name = "path-scan"
    title = "lumotree"
    policy = (
        "float32 state, products and sums, in the order of the native update; "
        "publication is the native update"
    )
    exact = True
    empty_path = True
    batched = True

    def __init__(
        self,
        tree: TreeDescriptor,
        geometry: Geometry,
        device: torch.device,
        *options,
        launch=None,
        seats: Tensor | None = None,
    ) -> None:
        super().__init__(tree, geometry, device, *options)
        self.seats = seats
        requests = 1 if seats is None else seats.numel()
        self.total = requests * self.rows
        self.ring = OperandRing(self, self.total)
        self.kernels = None
        self.cuts = None
        if has_kernels(self.device):
            from lumotree.ops.gdn_triton import GdnKernels

            self.kernels = GdnKernels(tree, geometry, self.device, launch, seats)
            if self.kernels.schedule.cuts:
                lead = () if seats is None else (requests,)
                shape = (self.kernels.schedule.cuts, geometry.heads, geometry.dk, geometry.dv)
                self.cuts = self.buffer("cut states", (*lead, *shape))

    def destination(self, layer: int, operands: Operands) -> Operands:
        return replace(self.ring.layer(layer), query=operands.query, overlap=operands.overlap)

    def verify(self, layer: int, recurrent: Tensor, operands: Operands) -> Tensor:
        self.place(layer, operands)
        g, state = self.geometry, recurrent.select(-4, layer)
        out = recurrent.new_empty(self.total, g.heads, g.dv)
        if self.kernels is not None:
            self.kernels.scan(state, operands, out, self.cuts)
            return out
        for request, seat in self._live():
            rows = slice(request * self.rows, (request + 1) * self.rows)
            own = operands.map(lambda x, rows=rows: x[rows])
            out[rows] = node_states(self.tree, state[seat], own)[0]
        return out

    def publish(self, recurrent: Tensor, path: Path) -> None:
        if self.kernels is not None:
            self.kernels.replay(recurrent, self.ring.operands, path)
            return
        for request, seat in self._live():
            rows = torch.atleast_2d(path.rows)[request, : int(path.count[request])]
            for layer, state in enumerate(recurrent[seat]):
                kept = self.ring.layer(layer)
                for row in (rows + request * self.rows).tolist():
                    state.copy_(update_rows(state[None], kept, [row])[1][0])

    def _live(self) -> list[tuple]:
        """Requests that are somebody's, and where their states lie; for the torch definition."""
        if self.seats is None:
            return [(0, ...)]
        return [(i, seat) for i, seat in enumerate(self.seats.tolist()) if seat >= 0]


def node_states(tree: TreeDescriptor, state: Tensor, operands: Operands) -> tuple[Tensor, Tensor]:
    """Outputs [rows, heads, dv] and states [rows, heads, dk, dv] of all rows, depth by depth."""
    depths: list[list[int]] = [[] for _ in range(max(tree.depth) + 1)]
    for row, depth in enumerate(tree.depth):
        depths[depth].append(row)
    states = state.new_empty(len(tree), *state.shape)
    out = state.new_empty(len(tree), state.shape[0], state.shape[2])
    for depth, rows in enumerate(depths):
        before = state[None] if depth == 0 else states[[tree.parents[row] for row in rows]]
        out[rows], states[rows] = update_rows(before, operands, rows)
    return out, states
