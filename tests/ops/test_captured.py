"""Whole decode steps of the kernels: several requests in one round, and each alone.

The gpu tests of tests/gpu do the same and more on a model that speaks.
"""

from __future__ import annotations

from tests.ops.running import needs_triton, run_scenes


@needs_triton
def test_in_the_interpreter():
    run_scenes(
        "captured_scenes.py", "cpu", "together", "cut", "forced", "laps", TRITON_INTERPRET="1"
    )
