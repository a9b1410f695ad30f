"""Scenes of test_gdn.py, run as `python gdn_scenes.py DEVICE NAME ...`.

A process of its own, because Triton reads whether to interpret when it is imported.
"""

from __future__ import annotations

import sys
from pathlib import Path as Place

sys.path.insert(0, str(Place(__file__).resolve().parents[2]))

import torch  # noqa: E402

from lumotree.bench.inputs import random_operands  # noqa: E402
from lumotree.ops.gdn import Geometry, Operands, Path  # noqa: E402
from lumotree.ops.table import has_kernels  # noqa: E402
from lumotree.tree import tree_from_name  # noqa: E402
from lumotree.verifiers.path_scan import PathScan  # noqa: E402

TREE = tree_from_name("-1,0,0,1")
# Few programs, for the interpreter; a device runs the published head widths.
GEOMETRY, BLOCK = Geometry(layers=2, heads=2, key_heads=1, dk=8, dv=8), 8
# Seats of three requests, one of them nobody's, and their paths.
WHERE, SEATS = (3, -1, 0), 5
PATHS = ((0, 1, 3), (0, 1), (0, 2))
DEVICE = torch.device("cpu")


class Batch:
    """States in seats, operands of all requests, and the rows of each."""

    def __init__(self) -> None:
        g, self.count = GEOMETRY, len(TREE)
        self.seats = torch.tensor(WHERE, dtype=torch.int32, device=DEVICE)
        generator = torch.Generator().manual_seed(0)
        # One layer more than the kernels see: a seat's stride is not its size.
        shape = (SEATS, g.layers + 1, g.heads, g.dk, g.dv)
        self.pool = torch.randn(shape, generator=generator).to(DEVICE)
        self.before = self.pool.clone()
        total = len(WHERE) * self.count
        self.operands = [random_operands(g, total, DEVICE, seed) for seed in range(g.layers)]
        result = torch.zeros(len(WHERE), max(TREE.depth) + 3, dtype=torch.int32)
        for line, path in zip(result, PATHS, strict=True):
            line[0] = len(path)
            line[1 : 1 + len(path)] = torch.tensor(path)
        result = result.to(DEVICE)
        self.path = Path(result[:, 1:], result[:, 0])

    @property
    def recurrent(self) -> torch.Tensor:
        """[N, layers, heads, dk, dv], a view."""
        return self.pool[:, : GEOMETRY.layers]

    def rows(self, i: int) -> slice:
        return slice(i * self.count, (i + 1) * self.count)

    def own(self, i: int, operands: Operands) -> Operands:
        return operands.map(lambda x: x[self.rows(i)].contiguous())

    def untouched(self) -> None:
        """Seats that no request has, and what lies between the others."""
        free = [seat for seat in range(SEATS) if seat not in WHERE]
        assert torch.equal(self.pool[free], self.before[free])
        assert torch.equal(self.pool[:, GEOMETRY.layers :], self.before[:, GEOMETRY.layers :])


def kernels():
    """A scan and a native update: outputs as alone, nobody's stay what they were."""
    from lumotree.ops.gdn_triton import GdnKernels

    batch, launch = Batch(), launch_of("split")
    many = GdnKernels(TREE, GEOMETRY, DEVICE, launch, batch.seats)
    one = GdnKernels(TREE, GEOMETRY, DEVICE, launch)
    operands, states = batch.operands[0], batch.pool[:, 1]
    read, updated = nothing_like(operands.value), nothing_like(operands.value)
    many.scan(states, operands, read, None)
    assert torch.equal(batch.pool, batch.before)
    many.update(states, operands, batch.path, updated)
    for i, seat in enumerate(WHERE):
        rows, state = batch.rows(i), batch.before[seat, 1].clone()
        if seat < 0:
            assert read[rows].isnan().all() and updated[rows].isnan().all()
            continue
        own = batch.own(i, operands)
        out = nothing_like(own.value)
        one.scan(state, own, out, None)
        assert torch.equal(read[rows], out)
        out.fill_(0)
        one.update(state, own, Path.of(TREE, PATHS[i], DEVICE), out)
        assert torch.equal(updated[rows].nan_to_num(), out) and out.any()
        assert torch.equal(states[seat], state)
    assert torch.equal(batch.pool[:, 0], batch.before[:, 0])
    batch.untouched()


def verifier():
    """Several requests verified and published as each is alone, whatever computes it."""
    batch, launch = Batch(), launch_of("cut")
    many = PathScan(TREE, GEOMETRY, DEVICE, launch=launch, seats=batch.seats)
    one = PathScan(TREE, GEOMETRY, DEVICE, launch=launch)
    outs = [many.verify(i, batch.recurrent, o) for i, o in enumerate(batch.operands)]
    assert torch.equal(batch.pool, batch.before)
    many.publish(batch.recurrent, batch.path)
    for i, seat in enumerate(WHERE):
        if seat < 0:
            assert many.cuts is None or many.cuts[i].isnan().all()
            continue
        state = batch.before[seat, : GEOMETRY.layers].clone()
        for layer, operands in enumerate(batch.operands):
            out = one.verify(layer, state, batch.own(i, operands))
            assert torch.equal(outs[layer][batch.rows(i)], out)
        one.publish(state, Path.of(TREE, PATHS[i], DEVICE))
        assert torch.equal(batch.recurrent[seat], state)
    batch.untouched()


def nothing_like(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, float("nan"), dtype=torch.float32)


def launch_of(schedule: str):
    """None where torch alone computes."""
    if not has_kernels(DEVICE):
        return None
    from lumotree.ops.gdn_triton import Launch

    return Launch(BLOCK, schedule)


if __name__ == "__main__":
    torch.set_num_threads(1)
    DEVICE = torch.device(sys.argv[1])
    if DEVICE.type == "cuda":
        GEOMETRY, BLOCK = Geometry(layers=2, heads=4, key_heads=2, dk=128, dv=128), 32
    for name in sys.argv[2:]:
        globals()[name]()
