"""Runs scenes in a process of their own: Triton reads whether to interpret when it is imported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")


def run_scenes(file: str, device: str, *names: str, **environment: str) -> None:
    """The scenes `names` of a file beside this one, on a device; fails with what they said."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(file)), device, *names],
        env={**os.environ, **environment},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=1200,  # a busy machine; the interpreter is slow
    )
    assert done.returncode == 0, done.stderr
