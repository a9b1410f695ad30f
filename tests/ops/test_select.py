"""Selection kernels against sampling.py and the plain torch definition of draft candidates."""

from __future__ import annotations

import pytest

from tests.ops.running import needs_device, needs_triton, run_scenes

SCENES = "select_scenes.py"
NAMES = [
    "best", "sampling", "ties", "poison", "unsupported", "few_live", "rows_alone", "walks", "seats",
]  # fmt: skip


@needs_triton
def test_in_the_interpreter():
    run_scenes(SCENES, "cpu", *NAMES, TRITON_INTERPRET="1")


@pytest.mark.gpu
@needs_device
def test_on_the_device():
    run_scenes(SCENES, "cuda", *NAMES)
