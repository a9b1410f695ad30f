"""What tasks need from a package index, fetched once: wheels and environments.

Both are pinned: a wheel by its hash, an environment by exact versions. After the first time nothing
here asks the network.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from lumotree.errors import LumoTreeError

DONE = ".complete"


class EnvironmentSpec(BaseModel):
    """An environment file: the Python it needs, and every package with its exact version."""

    model_config = ConfigDict(extra="forbid")
    python: str
    requirements: list[str]


@dataclass(frozen=True)
class Environment:
    """A virtual environment and the Python installation below it."""

    folder: Path
    base: Path


def cache_folder() -> Path:
    """$LUMOTREE_CACHE, or lumotree in the user's cache folder."""
    named = os.environ.get("LUMOTREE_CACHE")
    if named:
        return Path(named).expanduser().resolve()
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home).resolve() / "lumotree"


def wheel(requirement: str, hashes: Sequence[str], cache: Path, python: str | None = None) -> Path:
    """The wheel of a pinned requirement such as `astropy==5.2` with one of the SHA-256 hashes.

    `python` is the version it is for, such as 3.11; None: the one that runs this. Raises
    LumoTreeError: not to be had, or another file than was pinned.
    """
    folder = cache / "wheels"
    name = requirement.partition("==")[0]
    for path in sorted(folder.glob(f"{name.replace('-', '_')}-*.whl")):
        if sha256_of(path) in hashes:
            return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        pip(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            + ([f"--python-version={python}"] if python else [])
            + ["--dest", place, requirement],
            f"the wheel of {requirement}",
        )
        (found,) = Path(place).glob("*.whl")
        sha256 = sha256_of(found)
        if sha256 not in hashes:
            raise LumoTreeError(
                f"the wheel {found.name} has sha256 {sha256}, which the task does not name",
                "tasks are pinned to the published wheels of Linux; do not trust this one",
            )
        os.replace(found, folder / found.name)
        return folder / found.name


def read_environment(path: Path) -> EnvironmentSpec:
    """Raises LumoTreeError."""
    try:
        return EnvironmentSpec.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise LumoTreeError(f"{path} is no environment file: {error}") from None


def environment(spec_path: Path, cache: Path, python: str | None = None) -> Environment:
    """The environment of a file, made when it is not there yet. Raises LumoTreeError."""
    spec = read_environment(spec_path)
    spec_path = spec_path.resolve()
    program = python or shutil.which(f"python{spec.python}")
    if program is None and sys.version.startswith(f"{spec.python}."):
        program = sys.executable
    if program is None:
        raise LumoTreeError(
            f"these tasks need Python {spec.python}, and no python{spec.python} is on the PATH",
            "install it, or name one with --python",
        )
    key = hashlib.sha256(json.dumps([program, spec.model_dump()]).encode()).hexdigest()[:16]
    folder = cache / "environments" / f"{spec_path.parent.name}-{key}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        # Tasks beside one another, and other studies, wait for whoever is making it.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / DONE).exists():
            make_environment(folder, program, spec.requirements, spec_path.name)
    return describe(folder)


def make_environment(folder: Path, program: str, requirements: list[str], name: str) -> None:
    """Makes a virtual environment with the packages of the file `name`. Raises LumoTreeError."""
    shutil.rmtree(folder, ignore_errors=True)
    pip([program, "-m", "venv", str(folder)], "a virtual environment")
    pip(
        [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps"]
        + ["--only-binary", ":all:", *requirements],
        f"the packages of {name}",
    )
    (folder / DONE).touch()


def own_environment() -> Environment:
    """The environment that runs this process, for tasks that name none."""
    return Environment(Path(sys.prefix), Path(sys.base_prefix))


def describe(folder: Path) -> Environment:
    """Finds the installation below a virtual environment. Raises LumoTreeError."""
    python = folder / "bin" / "python"
    code = "import sys; print(sys.base_prefix)"
    try:
        done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True)
    except OSError as error:
        raise LumoTreeError(f"{python} does not start: {error.strerror}") from None
    return Environment(folder, Path(done.stdout.strip()))


def sha256_of(path: Path) -> str:
    """Hex digest of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def pip(argv: list[str], what: str) -> None:
    """Runs a command of the package tools. Raises LumoTreeError with its last line."""
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise LumoTreeError(
            f"{what} cannot be made: {lines[-1] if lines else 'no reason was given'}",
            "the first time needs a package index; afterwards the cache is used",
        )
