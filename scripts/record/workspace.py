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
from pathlib import Path

from replay.agent.shell import STABLE, Result, cap, without_durations

TIMEOUT_S = 60
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|home|tmp|usr|opt|var|private|Users)\b")


class WorkspaceError(Exception):
    """The workspace could not be made, or a command's output cannot be recorded."""


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
        return without_durations(output)


def _write_python(tools: Path) -> None:
    """`python` is the interpreter that records; a wrapper, since a link would leave its venv."""
    tools.mkdir()
    wrapper = tools / "python"
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    wrapper.chmod(0o755)


def _environment(root: Path, tools: Path) -> dict[str, str]:
    return {
        **STABLE,
        "PATH": f"{tools}:/usr/bin:/bin:{Path(shutil.which('git') or '/bin/git').parent}",
        "HOME": str(tools),
        # An installed copy of this repository must not shadow the workspace.
        "PYTHONPATH": str(root),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
