"""Kernels for long runs of prompt tokens against their definitions in torch and float64."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCENES = Path(__file__).with_name("prefill_scenes.py")
NAMES = ["delta", "delta_alone", "attention", "attention_operands", "attention_alone", "swiglu"]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@needs_triton
def test_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, str(SCENES), "cpu", *NAMES],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("name", NAMES)
def test_on_the_device(name):
    done = subprocess.run(
        [sys.executable, str(SCENES), "cuda", name],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
