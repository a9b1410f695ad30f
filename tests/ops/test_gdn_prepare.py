"""Operands, gated norm and conv histories of the kernels against their definition in torch."""

from __future__ import annotations

import pytest

from tests.ops.running import needs_device, needs_triton, run_scenes

SCENES = "gdn_prepare_scenes.py"
NAMES = ["rows", "rows_alone", "run", "finish", "histories", "seats"]


@needs_triton
def test_in_the_interpreter():
    run_scenes(SCENES, "cpu", *NAMES, TRITON_INTERPRET="1")


@pytest.mark.gpu
@needs_device
def test_on_the_device():
    run_scenes(SCENES, "cuda", *NAMES)
