"""What run.json says about where a run happened. No host, user or directory names."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("lumotree", "torch", "triton", "transformers", "numpy")


def describe_machine() -> dict[str, Any]:
    """System, processor, cores that this process may use, and the GPU that torch has loaded for."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count()
    torch = sys.modules.get("torch")  # never loaded for this alone
    gpu = torch.cuda.get_device_name() if torch and torch.cuda.is_available() else None
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cpu": _cpu_name(),
        "cores": cores,
        **({"gpu": gpu} if gpu else {}),
    }


def describe_versions() -> dict[str, str]:
    """Versions of Python and of the packages that move a measurement."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def git_commit() -> str | None:
    """The commit of this source tree, `+` behind it when files differ; None outside git.

    An installed copy may lie inside somebody else's repository, so the file must be tracked.
    """
    here = Path(__file__).parent
    if _git(here, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    commit = _git(here, "rev-parse", "HEAD")
    changed = _git(here, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+" if commit and changed else commit


def _git(where: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(where), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
