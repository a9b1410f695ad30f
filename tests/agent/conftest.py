"""Tasks on a package of a few lines, so that a whole study takes seconds and no network."""

from __future__ import annotations

import json
import shutil
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from replay.agent.cache import Environment, describe
from replay.agent.grading import Grader
from replay.agent.sandbox import Sandbox
from replay.agent.tasks import Task, load_tasks
from replay.agent.workspace import Workspaces

MODULE = """\
def double(number):
    return number * 2


def label(number):
    return f"<{number}>"


def shorten(text, limit=5):
    return text[:limit]
"""
TESTS = """\
import pytest

from tinypkg import numbers


class TestDouble:
    @pytest.mark.parametrize("number", [1, 2, 5])
    def test_double(self, number):
        assert numbers.double(number) == number + number


def test_label():
    assert numbers.label(3) == "<3>"


def test_shorten():
    assert numbers.shorten("abcdefgh") == "abcde"


def test_skipped():
    pytest.skip("never counted")
"""
FILE, TEST_FILE = "tinypkg/numbers.py", "tinypkg/tests/test_numbers.py"
FAULTS = {
    "tiny-double": ("number * 2", "number * 3", "double(2) is 6, it should be 4."),
    "tiny-label": ('f"<{number}>"', 'f"<{number}"', "Labels have no closing bracket."),
    "tiny-shorten": ("text[:limit]", "text[: limit - 1]", "Texts lose a character too many."),
}
SCRIPT = """\
## agent
I look at the module.
````sh
cat tinypkg/numbers.py; ls
````
## agent, exit 3
A command that fails, as commands do.
````sh
exit 3
````
## fix
This is the line.
## agent
The tests that are there.
````sh
python -m pytest -q
````
## done
Mended.
"""


def build_wheel(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tinypkg/__init__.py", "")
        archive.writestr(FILE, MODULE)
        archive.writestr("tinypkg/tests/__init__.py", "")
        archive.writestr(TEST_FILE, TESTS)
        archive.writestr("tinypkg-1.0.dist-info/METADATA", "Name: tinypkg\n")


def write_tasks(folder: Path) -> None:
    """`tasks`, `scripts` and the wheel, as corpora/astropy has them."""
    (folder / "tasks").mkdir(parents=True)
    (folder / "scripts").mkdir()
    build_wheel(folder / "tiny.whl")
    for name, (old, new, words) in FAULTS.items():
        task = {
            "schema_version": 1,
            "id": name,
            "set": "tiny",
            "workspace": {"wheel": "../tiny.whl"},
            "setup": [{"file": FILE, "old": old, "new": new}],
            "problem_statement": words,
            "test_files": [TEST_FILE],
            **EXPECTED[name],
        }
        (folder / "tasks" / f"{name}.json").write_text(json.dumps(task))
        # One runs the tests, which is slow and whose duration must not be in a recording.
        quick = (
            SCRIPT if name == "tiny-label" else SCRIPT.replace("python -m pytest -q", "git diff")
        )
        (folder / "scripts" / f"{name}.md").write_text(quick)


DOUBLE = [f"{TEST_FILE}::TestDouble::test_double[{n}]" for n in (1, 2, 5)]
LABEL, SHORTEN = f"{TEST_FILE}::test_label", f"{TEST_FILE}::test_shorten"
EXPECTED = {
    "tiny-double": {"FAIL_TO_PASS": DOUBLE, "PASS_TO_PASS": [LABEL, SHORTEN]},
    "tiny-label": {"FAIL_TO_PASS": [LABEL], "PASS_TO_PASS": [*DOUBLE, SHORTEN]},
    "tiny-shorten": {"FAIL_TO_PASS": [SHORTEN], "PASS_TO_PASS": [*DOUBLE, LABEL]},
}


@pytest.fixture(scope="session")
def sandbox() -> Sandbox:
    if sys.platform != "linux":
        pytest.skip("workspaces need Linux")
    return Sandbox.choose()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tasks(folder)
    return folder


@pytest.fixture(scope="session")
def tasks(tiny_folder: Path) -> list[Task]:
    return load_tasks([tiny_folder])


class SmallWorkspaces(Workspaces):
    """Every task in an environment that holds pytest and nothing else, which starts in no time."""

    def environment(self, task: Task) -> Environment:
        folder = self.cache / "small"
        if not folder.exists():
            venv.create(folder, with_pip=False, symlinks=True)
            (place,) = folder.glob("lib/python3*/site-packages")
            site = Path(pytest.__file__).parents[1]
            for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
                shutil.copytree(site / name, place / name)
            shutil.copy2(site / "py.py", place)
        return describe(folder)


@pytest.fixture(scope="session")
def workspaces(tmp_path_factory: pytest.TempPathFactory) -> Workspaces:
    return SmallWorkspaces(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def grader(workspaces: Workspaces, sandbox: Sandbox) -> Grader:
    return Grader(workspaces, sandbox)
