"""The GDN kernels on a device: native bits at published head sizes, captured graphs."""

from __future__ import annotations

import pytest
import torch

from lumotree.bench import gdn as bench
from lumotree.bench.timing import Protocol
from lumotree.ops.gdn import Geometry
from lumotree.verifiers import NAMES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CUDA = torch.device("cuda")
TWO_LAYERS = Geometry(layers=2, heads=48, key_heads=16, dk=128, dv=128)


@pytest.mark.parametrize("schedule", ["split", "fine", "twigs", "paths", "cut"])
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("early", [False, True])
def test_every_schedule_has_native_bits(schedule, block, early):
    from lumotree.ops.gdn_triton import Launch

    launch = Launch(block, schedule, early=early)
    case = bench.Case(TWO_LAYERS, bench.active_tree("hydra27"), CUDA, launch=launch)
    gate = bench.check(case, case.make("path-scan"))
    assert gate.green, gate.reasons


@pytest.mark.parametrize("name", NAMES)
def test_every_verifier_is_right_and_captures(name):
    case = bench.Case(TWO_LAYERS, bench.active_tree("hydra27"), CUDA)
    quick = Protocol(warmup=1, timed=2)
    row = bench.run_row(case, name, quick, quick)
    assert row.gate.green, row.gate.reasons
    assert row.graph_ms["total"].median > 0


def test_the_fallback_tile_fits_any_width():
    from lumotree.ops.gdn_triton import choose

    for dk, dv in ((32, 32), (64, 64), (128, 96), (256, 256)):
        launch = choose(Geometry(1, 4, 2, dk, dv), CUDA)
        assert dv % launch.block == 0 and dk * launch.block <= 128 * 32
