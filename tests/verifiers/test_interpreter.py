"""The Triton kernels in Triton's interpreter, against the torch reference and float64.

Triton is no dependency (its wheel installs 690 MB): `pip install triton` to run these.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch
from lumotree.bench import gdn as bench
from lumotree.ops.gdn import Geometry
from lumotree.ops.gdn_triton import Launch

torch.set_num_threads(1)
geometry = Geometry(layers=1, heads=2, key_heads=1, dk=32, dv=32)
case = bench.Case(geometry, bench.active_tree("{tree}"), torch.device("cpu"),
                  launch=Launch({block}, "{schedule}"))
verifier = case.make("{name}")
assert getattr(verifier, "kernels", None) or verifier.kernel
gate = bench.check(case, verifier)
assert gate.green, gate
"""
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@pytest.mark.parametrize(
    ("name", "schedule", "block"),
    [
        ("path-scan", "split", 16),
        ("path-scan", "twigs", 32),
        ("path-scan", "paths", 16),
        ("path-scan", "cut", 16),
        ("native-path", "split", 16),
        ("weaver", "split", 16),
        ("tree-wy", "split", 16),
    ],
)
def test_kernels_in_the_interpreter(name, schedule, block):
    script = SCRIPT.format(tree="-1,0,0,1,1,3", name=name, schedule=schedule, block=block)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
