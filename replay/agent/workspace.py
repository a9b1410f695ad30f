"""Workspaces: built once from pinned sources, copied for each attempt, with a shell in them."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lumotree.errors import LumoTreeError
from replay.agent.cache import (
    Environment,
    environment,
    own_environment,
    read_environment,
    sha256_of,
    wheel,
)
from replay.agent.patch import apply, commit_all, git
from replay.agent.sandbox import SYSTEM, WORKSPACE, Place, Sandbox
from replay.agent.shell import OUTPUT_CAP, STABLE, Result, cap, without_durations
from replay.agent.supervise import Ended, Limits
from replay.agent.tasks import Source, Task

VENV = "/venv"
# Part of the cache's keys: raise it when the way workspaces are built changes.
FORMAT = 4
# 2026-01-01, as the commits of a workspace.
TIME = 1_767_225_600


class Workspaces:
    """Builds what tasks start from, under a cache folder."""

    def __init__(self, cache: Path, python: str | None = None) -> None:
        self.cache, self._python = cache, python

    def environment(self, task: Task) -> Environment:
        """The environment of a task, made when it is not there yet. Raises LumoTreeError."""
        if task.environment is None:
            return own_environment()
        return environment(task.folder / task.environment, self.cache, self._python)

    def pristine(self, task: Task) -> Path:
        """The task's start as a repository of one commit, with the fault and without its tests.

        Nobody works in it: attempts copy it. Raises LumoTreeError.
        """
        same = task.hidden == task.workspace
        strip = sorted(task.fail_to_pass) if same else []
        edits = [edit.model_dump() for edit in task.setup]
        known = [FORMAT, self._key(task, task.workspace), edits, strip, task.test_files]
        key = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]
        folder = self.cache / "workspaces" / f"{task.id}-{key}"
        if folder.exists():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as place:
            root = Path(place) / "root"
            shutil.copytree(self._compiled(task), root, symlinks=True)
            for edit in task.setup:
                edit.apply(root)
            for name in task.test_files if strip else ():
                path = root / name
                path.write_text(strip_tests(path.read_text(encoding="utf-8"), strip))
            commit_all(root)
            # Another process may have been faster; then its work is as good.
            if not folder.exists():
                root.rename(folder)
        return folder

    def _compiled(self, task: Task) -> Path:
        """The source unpacked, with byte code: many tasks share one.

        Importing a large package is most of a short command's time. Files that a task or an agent
        changes have another time and are compiled anew, in memory.
        """
        environment = self.environment(task)
        known = [FORMAT, self._key(task, task.workspace), str(environment.folder)]
        key = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]
        folder = self.cache / "sources" / key
        if folder.exists():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as place:
            root = Path(place) / "root"
            root.mkdir()
            self._unpack(task, task.workspace, root)
            # One old time for all: byte code is told from newer sources by the second alone.
            for path in root.rglob("*"):
                os.utime(path, (TIME, TIME), follow_symlinks=False)
            words = ["-m", "compileall", "-q", "-s", str(root), "-p", WORKSPACE, str(root)]
            # Files that do not compile, such as tests of syntax errors, are left as they are.
            python = environment.folder / "bin" / "python"
            subprocess.run([python, *words], capture_output=True)
            if not folder.exists():
                root.rename(folder)
        return folder

    def checkout(self, task: Task, into: Path) -> Path:
        """A copy of the pristine workspace at `into`, which must not exist yet."""
        shutil.copytree(self.pristine(task), into, symlinks=True)
        return into

    def restore_tests(self, task: Task, root: Path) -> None:
        """Writes the judging test files over whatever is there. Raises LumoTreeError."""
        for name, data in self.hidden_tests(task).items():
            path = root / name
            if path.is_symlink() or path.is_file():
                path.unlink()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def hidden_tests(self, task: Task) -> dict[str, bytes]:
        """The judging test files by name. Raises LumoTreeError."""
        source = task.hidden
        if source.mirror is None:
            with zipfile.ZipFile(self._wheel(task, source)) as archive:
                try:
                    return {name: archive.read(name) for name in task.test_files}
                except KeyError as error:
                    raise LumoTreeError(f"task {task.id}: {error.args[0]}") from None
        with tempfile.TemporaryDirectory(prefix="lumotree-tests-") as place:
            root = Path(place)
            self._unpack(task, source, root)
            if source.patch:
                commit_all(root)
                apply(source.patch, root)
            found = {name: root / name for name in task.test_files}
            return {name: path.read_bytes() for name, path in found.items() if path.is_file()}

    def _unpack(self, task: Task, source: Source, root: Path) -> None:
        if source.mirror is None:
            with zipfile.ZipFile(self._wheel(task, source)) as archive:
                names = [n for n in archive.namelist() if ".dist-info/" not in n]
                archive.extractall(root, names)
            return
        mirror = (task.folder / source.mirror).resolve()
        data = git("archive", "--format=tar", source.commit, folder=mirror)
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            # The first releases of Python 3.11 know no filter; the commit is pinned anyway.
            safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            tar.extractall(root, **safe)

    def _wheel(self, task: Task, source: Source) -> Path:
        if source.requirement is not None:
            python = None
            if task.environment is not None:
                python = read_environment(task.folder / task.environment).python
            return wheel(source.requirement, source.sha256, self.cache, python)
        path = task.folder / source.wheel
        if not path.is_file():
            raise LumoTreeError(f"task {task.id}: the wheel {path} does not exist")
        if source.sha256 and sha256_of(path) not in source.sha256:
            raise LumoTreeError(f"task {task.id}: {path} has another sha256 than the task names")
        return path

    def _key(self, task: Task, source: Source) -> str:
        """What tells two sources apart."""
        if source.wheel is not None:
            return sha256_of(self._wheel(task, source))
        return source.model_dump_json()


@dataclass(frozen=True)
class TaskShell:
    """Runs commands in a workspace: contained, limited, and with repeatable output."""

    sandbox: Sandbox
    root: Path
    environment: Environment
    limits: Limits = Limits()
    output_cap: int = OUTPUT_CAP
    readonly: tuple[tuple[Path, str], ...] = ()

    def run(self, command: str) -> Result:
        """As the agent sees it: text, capped, durations and places of this machine taken out."""
        try:
            ended = self.raw(command)
        except (OSError, ValueError) as error:
            # Longer than the kernel takes, or text that has no bytes.
            reason = error.strerror if isinstance(error, OSError) else "it is no valid text"
            return Result(126, f"the command could not be started: {reason}\n")
        output = ended.output.decode("utf-8", errors="replace")
        output = output.replace("\r\n", "\n").replace("\0", "\\0")
        for real, seen in ((self.root, WORKSPACE), (self.environment.folder, VENV)):
            output = output.replace(str(real), seen)
        fault = ended.fault
        if fault is None and ended.left:
            plural = "es" if ended.left > 1 else ""
            fault = f"left {ended.left} process{plural} in the background, which were ended"
        code = ended.exit_code if ended.exit_code >= 0 else 128 - ended.exit_code
        return Result(code, cap(without_durations(output), self.output_cap), fault)

    def raw(self, command: str, keep: int | None = None) -> Ended:
        """Runs a command, which has `keep` as descriptor 4; bytes as they came."""
        venv, base = self.environment.folder, self.environment.base
        mounts = list(self.readonly)
        if not any(str(base) == top or str(base).startswith(f"{top}/") for top in SYSTEM):
            mounts.append((base, str(base)))
        seen = str(base)
        if venv != base:
            mounts.append((venv, VENV))
            seen = VENV
        if not self.sandbox.contains:
            seen = str(venv)
        path = f"{seen}/bin:/usr/bin:/bin"
        known = {**STABLE, "PATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        return self.sandbox.run(command, Place(self.root, tuple(mounts)), self.limits, known, keep)


def strip_tests(text: str, ids: Sequence[str]) -> str:
    """A test file less the test functions that `ids` (pytest node ids) name."""
    names = {tuple(node.partition("[")[0].split("::")[1:]) for node in ids}
    lines = text.splitlines(keepends=True)
    gone: set[int] = set()

    def visit(body: list[ast.stmt], above: tuple[str, ...]) -> None:
        dropped = []
        for node in body:
            if isinstance(node, ast.ClassDef):
                visit(node.body, (*above, node.name))
            elif isinstance(node, ast.FunctionDef) and (*above, node.name) in names:
                dropped.append(node)
        for node in dropped:
            first = min([node.lineno, *(mark.lineno for mark in node.decorator_list)])
            gone.update(range(first, node.end_lineno + 1))
        if above and len(dropped) == len(body):
            # A class needs a body.
            lines[dropped[0].end_lineno - 1] = " " * dropped[0].col_offset + "pass\n"
            gone.discard(dropped[0].end_lineno)

    visit(ast.parse(text).body, ())
    return "".join(line for number, line in enumerate(lines, start=1) if number not in gone)
