"""The agent's work as a diff, taken without trusting anything in the workspace's own `.git`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path, PurePosixPath

from lumotree.errors import LumoTreeError
from replay.agent.shell import STABLE

# What running Python leaves behind, and no agent wrote.
LITTER = ("__pycache__/", "*.py[co]", ".pytest_cache/", ".hypothesis/", "*.egg-info/")
CONFTEST = ("conftest.py", "pytest.ini", ".pytest.ini", "tox.ini")


def git(*arguments: str, folder: Path, environment: dict[str, str] | None = None) -> bytes:
    """Runs git with no configuration but its own. Raises LumoTreeError with its words."""
    known = {**STABLE, "PATH": os.environ.get("PATH", "/usr/bin:/bin"), "HOME": "/nonexistent"}
    done = subprocess.run(
        ["git", *arguments], cwd=folder, env={**known, **(environment or {})}, capture_output=True
    )
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip()
        raise LumoTreeError(f"git {arguments[0]} failed: {words[-300:]}")
    return done.stdout


def commit_all(folder: Path) -> str:
    """Makes a folder a repository with one commit of all it holds; returns the commit."""
    git("init", "-q", "-b", "main", "--template=", folder=folder)
    (folder / ".git" / "info").mkdir(exist_ok=True)
    (folder / ".git" / "info" / "exclude").write_text("\n".join(LITTER) + "\n")
    git("config", "gc.auto", "0", folder=folder)
    # By force: what a repository ignores may be part of it all the same.
    git("add", "-A", "-f", ".", ":(exclude,glob)**/__pycache__/**", folder=folder)
    git("commit", "-q", "-m", "Start of the task", folder=folder)
    # One file in place of one for each object: every attempt copies them.
    git("repack", "-q", "-a", "-d", folder=folder)
    return git("rev-parse", "HEAD", folder=folder).decode().strip()


def diff(workspace: Path, pristine: Path) -> str:
    """What differs in `workspace` from the commit of `pristine`, the repository it was copied from.

    Commits, hooks, filters and settings that the agent made in its own `.git` play no part.
    Repositories that it made inside count as plain files. Raises LumoTreeError.
    """
    _open_up(workspace)
    with tempfile.TemporaryDirectory(prefix="lumotree-diff-") as place:
        scratch = Path(place)
        (scratch / "objects").mkdir()
        environment = {
            "GIT_DIR": str(pristine / ".git"),
            "GIT_WORK_TREE": str(workspace),
            "GIT_INDEX_FILE": str(scratch / "index"),
            "GIT_OBJECT_DIRECTORY": str(scratch / "objects"),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(pristine / ".git" / "objects"),
        }
        git("read-tree", "HEAD", folder=workspace, environment=environment)
        git("add", "-A", ".", folder=workspace, environment=environment)
        words = ("diff", "--cached", "--binary", "--no-ext-diff", "--no-textconv", "--no-renames")
        found = git(*words, "HEAD", folder=workspace, environment=environment)
    return found.decode("utf-8", errors="surrogateescape")


def _open_up(root: Path) -> None:
    """Makes everything readable, and takes away repositories inside, which git would not enter."""
    for place, folders, files in os.walk(root):
        for name in list(folders):
            path = Path(place, name)
            if path.is_symlink():
                continue
            path.chmod(path.stat().st_mode | 0o700)
            if name == ".git":
                folders.remove(name)
                if Path(place) != root:
                    shutil.rmtree(path, ignore_errors=True)
        for name in files:
            path = Path(place, name)
            if path.is_file() and not path.is_symlink():
                path.chmod(path.stat().st_mode | 0o600)


def is_test_path(name: str) -> bool:
    """Whether a file belongs to the tests or steers them: no part of a fix that is graded."""
    path = PurePosixPath(name)
    return (
        any(part in ("test", "tests") for part in path.parts[:-1])
        or path.name in CONFTEST
        or re.fullmatch(r"test_.*\.py|.*_test\.py", path.name) is not None
    )


def without_tests(patch: str) -> str:
    """The patch less every file that `is_test_path` names."""
    kept = []
    for part in re.split(r"(?m)^(?=diff --git )", patch):
        if part and not is_test_path(_name(part)):
            kept.append(part)
    return "".join(kept)


def _name(part: str) -> str:
    """The file of one part. Without renames both names of the first line are the same."""
    first = part.partition("\n")[0].removeprefix("diff --git ")
    if first.startswith('"'):  # quoted: unusual characters, as in "a/x\303\244" "b/x\303\244"
        return first[1 : len(first) // 2 - 1].removeprefix("a/")
    return first[: len(first) // 2].removeprefix("a/")


def apply(patch: str, folder: Path) -> None:
    """Applies a patch made by `diff`. Raises LumoTreeError."""
    with tempfile.NamedTemporaryFile(prefix="lumotree-", suffix=".diff") as file:
        file.write(patch.encode("utf-8", errors="surrogateescape"))
        file.flush()
        git("apply", "--binary", "--whitespace=nowarn", file.name, folder=folder)
