"""A scratch copy of the repository at a pinned revision, and a shell in it.

What a command prints must be the same on every machine, because it becomes part of a corpus with
a frozen hash. So the environment is built from nothing, paths of this machine and durations are
taken out of the output, and anything that still looks like an absolute path is an error.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

OUTPUT_CAP = 4000
TIMEOUT_S = 60
# Test runners end with "in 0.12s": the one thing in their output that is never twice the same.
DURATION = re.compile(r" in \d+\.\d+s\b")
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|home|tmp|usr|opt|var|private|Users)\b")
STAMP = "2026-01-01T00:00:00+00:00"


class WorkspaceError(Exception):
    """The workspace could not be made, or a command's output cannot be recorded."""


@dataclass(frozen=True)
class Result:
    """A command's exit code and its output, stdout and stderr in one, normalised and capped."""

    exit_code: int
    output: str


class Workspace:
    """`create` fills it; `run` runs one command in a fresh shell at its root."""

    def __init__(self, root: Path, environment: dict[str, str]) -> None:
        self.root = root
        self._environment = environment

    @classmethod
    def create(
        cls, repository: Path, revision: str, paths: tuple[str, ...], into: Path
    ) -> Workspace:
        """Unpacks `paths` of `revision` under `into` and commits them as the task's start."""
        archive = subprocess.run(
            ["git", "-C", str(repository), "archive", "--format=tar", revision, "--", *paths],
            capture_output=True,
        )
        if archive.returncode:
            raise WorkspaceError(f"git archive {revision}: {archive.stderr.decode().strip()}")
        into = into.resolve()
        root, tools = into / "repository", into / "bin"
        root.mkdir()
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            # The first releases of Python 3.11 know no filter; the archive is our own anyway.
            safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            tar.extractall(root, **safe)
        _write_python(tools)
        workspace = cls(root, _environment(root, tools))
        start = workspace.run(
            "git init -q -b main && git add -A && git commit -q -m 'Start of the task'"
        )
        if start.exit_code:
            raise WorkspaceError(f"git init: {start.output}")
        return workspace

    def run(self, command: str) -> Result:
        """Raises WorkspaceError when the command hangs or prints a path of this machine."""
        try:
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=self.root,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise WorkspaceError(f"no end after {TIMEOUT_S} s: {command}") from error
        output = self.normalise(done.stdout.decode("utf-8", errors="replace"))
        if found := MACHINE_PATH.search(output):
            line = output[output.rfind("\n", 0, found.start()) + 1 :].partition("\n")[0]
            raise WorkspaceError(f"output names a path of this machine: {line!r} from: {command}")
        return Result(done.returncode, cap(output))

    def normalise(self, output: str) -> str:
        output = output.replace(f"{self.root}{os.sep}", "").replace(str(self.root), ".")
        return DURATION.sub("", output)


def cap(output: str, limit: int = OUTPUT_CAP) -> str:
    """Cuts the middle out of long output, as agents do, and says how much is gone."""
    if len(output) <= limit:
        return output
    head, tail = output[: limit // 2], output[-(limit - limit // 2) :]
    return f"{head}\n[{len(output) - limit} characters left out]\n{tail}"


def _write_python(tools: Path) -> None:
    """`python` is the interpreter that records; a wrapper, since a link would leave its venv."""
    tools.mkdir()
    wrapper = tools / "python"
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    wrapper.chmod(0o755)


def _environment(root: Path, tools: Path) -> dict[str, str]:
    return {
        "PATH": f"{tools}:/usr/bin:/bin:{Path(shutil.which('git') or '/bin/git').parent}",
        "HOME": str(tools),
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "COLUMNS": "80",
        "NO_COLOR": "1",
        # An installed copy of this repository must not shadow the workspace.
        "PYTHONPATH": str(root),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": "-p no:cacheprovider",
        # Hypothesis draws the same examples every time, and knows no deadline, where CI is set.
        "CI": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "core.abbrev",
        "GIT_CONFIG_VALUE_0": "7",
        "GIT_AUTHOR_NAME": "developer",
        "GIT_AUTHOR_EMAIL": "developer@example.com",
        "GIT_AUTHOR_DATE": STAMP,
        "GIT_COMMITTER_NAME": "developer",
        "GIT_COMMITTER_EMAIL": "developer@example.com",
        "GIT_COMMITTER_DATE": STAMP,
    }
