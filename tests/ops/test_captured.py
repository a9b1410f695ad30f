"""Whole decode steps of the kernels: several requests in one round, and each alone.

The gpu tests of tests/gpu do the same and more on a model that speaks.
"""

from __future__ import annotations

import pytest

from tests.ops.running import needs_triton, run_scenes


@needs_triton
@pytest.mark.parametrize("names", [("together",), ("cut", "forced", "laps")], ids=" ".join)
def test_in_the_interpreter(names):
    run_scenes("captured_scenes.py", "cpu", *names, TRITON_INTERPRET="1")
