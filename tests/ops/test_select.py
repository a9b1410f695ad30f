"""Selection kernels against sampling.py and the plain torch definition of draft candidates."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCENES = Path(__file__).with_name("select_scenes.py")
NAMES = ["best", "sampling", "ties", "poison", "unsupported", "few_live", "rows_alone", "walks"]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def run(device: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCENES), device, *NAMES],
        env={**os.environ, **environment},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def test_in_the_interpreter():
    run("cpu", TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_on_the_device():
    run("cuda")
