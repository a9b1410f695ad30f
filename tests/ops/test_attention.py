"""Attention kernels against their definitions, and rows bit for bit against root-only steps."""

from __future__ import annotations

import pytest

from tests.ops.running import needs_device, needs_triton, run_scenes

SCENES = "attention_scenes.py"
NAMES = ["prepare", "attend", "stock", "move"]
SEATS, SEATS_NAMES = "attention_seats_scenes.py", ["step", "move", "refusals"]


@needs_triton
def test_in_the_interpreter():
    run_scenes(SCENES, "cpu", *NAMES, TRITON_INTERPRET="1")


@needs_triton
def test_seats_in_the_interpreter():
    run_scenes(SEATS, "cpu", *SEATS_NAMES, TRITON_INTERPRET="1")


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("name", NAMES)
def test_on_the_device(name):
    run_scenes(SCENES, "cuda", name)


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("name", SEATS_NAMES)
def test_seats_on_the_device(name):
    run_scenes(SEATS, "cuda", name)
