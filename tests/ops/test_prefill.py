"""Kernels for long runs of prompt tokens against their definitions in torch and float64."""

from __future__ import annotations

import pytest

from tests.ops.running import needs_device, needs_triton, run_scenes

SCENES = "prefill_scenes.py"
NAMES = ["delta", "delta_alone", "attention", "attention_operands", "attention_alone", "swiglu"]


@needs_triton
def test_in_the_interpreter():
    run_scenes(SCENES, "cpu", *NAMES, TRITON_INTERPRET="1")


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("name", NAMES)
def test_on_the_device(name):
    run_scenes(SCENES, "cuda", name)
