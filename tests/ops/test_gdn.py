"""Several requests in one launch of the GDN kernels: each as alone."""

from __future__ import annotations

import pytest

from tests.ops import gdn_scenes
from tests.ops.running import needs_device, needs_triton, run_scenes

SCENES = "gdn_scenes.py"
NAMES = ["kernels", "verifier"]


def test_in_torch():
    gdn_scenes.verifier()


@needs_triton
def test_in_the_interpreter():
    run_scenes(SCENES, "cpu", *NAMES, TRITON_INTERPRET="1")


@pytest.mark.gpu
@needs_device
def test_on_the_device():
    run_scenes(SCENES, "cuda", *NAMES)
