"""Grades: what resolves, what fails, what is no change, and what does not help a cheat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lumotree.errors import LumoTreeError
from replay.agent.grading import Grader
from replay.agent.patch import diff
from replay.agent.tasks import Task
from replay.agent.workspace import TaskShell, Workspaces
from tests.agent.conftest import DOUBLE, EXPECTED, FILE, LABEL, SHORTEN, TEST_FILE

PASSED = json.dumps(dict.fromkeys([*DOUBLE, LABEL, SHORTEN], "passed"))
# Writes outcomes into whatever was handed in: files named on the command line, descriptors.
FORGED = f"""cat >> tinypkg/__init__.py <<'END'
import os, sys
for name in [*sys.argv[1:], *range(3, 20)]:
    try:
        where = name if isinstance(name, int) else os.open(name, os.O_WRONLY | os.O_CREAT)
        os.lseek(where, 0, 0)
        os.write(where, b'''{PASSED}''')
    except OSError:
        pass
os._exit(0)
END"""


def patch_of(command: str, task: Task, workspaces: Workspaces, sandbox, place: Path) -> str:
    root = workspaces.checkout(task, place / "testbed")
    done = TaskShell(sandbox, root, workspaces.environment(task)).run(command)
    assert done.exit_code == 0, done.output
    return diff(root, workspaces.pristine(task))


@pytest.fixture
def graded(grader: Grader, workspaces: Workspaces, sandbox, tmp_path: Path, tasks: list[Task]):
    def grade(command: str, task: Task = tasks[0]):
        return grader.grade(task, patch_of(command, task, workspaces, sandbox, tmp_path))

    return grade


def test_every_task_is_red_before_and_green_after(grader: Grader, tasks: list[Task]) -> None:
    for task in tasks[:2]:
        assert grader.check(task) is None


def test_computed_lists_are_those_of_the_runs(grader: Grader, tasks: list[Task]) -> None:
    found = grader.compute(tasks[0])
    assert found.fail_to_pass == EXPECTED["tiny-double"]["FAIL_TO_PASS"]
    # A skipped test neither has to be mended nor to be kept.
    assert found.pass_to_pass == EXPECTED["tiny-double"]["PASS_TO_PASS"]


def test_a_wrong_task_is_found(grader: Grader, tasks: list[Task]) -> None:
    early = tasks[0].model_copy(update={"fail_to_pass": [*DOUBLE, LABEL]})
    assert "1 tests pass before the fix" in grader.check(early)
    never = tasks[0].model_copy(update={"pass_to_pass": [f"{TEST_FILE}::test_gone"]})
    assert "1 tests fail before the fix that should not" in grader.check(never)


def test_the_fix_resolves(graded, tasks: list[Task]) -> None:
    grade = graded(tasks[0].fix_command())
    assert (grade.outcome, grade.reason, grade.tests) == ("R", None, 5)


def test_a_fix_that_was_committed_resolves(graded, tasks: list[Task]) -> None:
    assert graded(f"{tasks[0].fix_command()}\ngit commit -qam done").outcome == "R"


def test_without_a_change_it_is_empty(graded) -> None:
    grade = graded("python -c 'import tinypkg'; python -m pytest -q; true")
    assert (grade.outcome, grade.reason) == ("E", "the diff is empty")


@pytest.mark.parametrize(
    "command",
    [
        f"cat > {TEST_FILE} <<'E'\nimport pytest\n\ndef test_label():\n    pass\nE",
        "echo 'collect_ignore_glob = [\"*\"]' > conftest.py",
        "printf '[pytest]\\naddopts = --co\\n' > pytest.ini",
        f"rm {TEST_FILE}",
    ],
    ids=["tests", "conftest", "pytest.ini", "removed"],
)
def test_changed_tests_are_no_change(graded, command: str) -> None:
    assert graded(command).outcome == "E"


@pytest.mark.parametrize(
    "command",
    [
        "echo 'def main(*a, **k): return 0' > pytest.py",
        "echo 'import os; os._exit(0)' > sitecustomize.py",
        "echo 'import os; os._exit(0)' >> tinypkg/__init__.py",
        FORGED,
        "printf '[tool:pytest]\\naddopts = --co\\n' > setup.cfg",
    ],
    ids=["pytest.py", "sitecustomize", "exit", "forged outcomes", "setup.cfg"],
)
def test_tricks_resolve_nothing(graded, command: str) -> None:
    assert graded(command).outcome == "F"


def test_a_fix_that_breaks_another_test_fails(graded, tasks: list[Task]) -> None:
    grade = graded(f"{tasks[0].fix_command()}\nsed -i 's/<{{/({{/' {FILE}")
    assert grade.outcome == "F" and grade.failed == (LABEL,)
    assert grade.reason == "0 of 3 tests still fail, 1 that passed fail now"


def test_a_fix_that_does_nothing_fails(graded) -> None:
    grade = graded(f"echo '# done' >> {FILE}")
    assert (grade.outcome, grade.reason) == ("F", "3 of 3 tests still fail")


def test_broken_source_fails_with_a_reason(graded) -> None:
    grade = graded(f"echo 'def broken(:' >> {FILE}")
    assert grade.outcome == "F" and grade.reason


def test_a_diff_that_does_not_apply_fails(grader: Grader, tasks: list[Task]) -> None:
    patch = f"diff --git a/{FILE} b/{FILE}\n--- a/{FILE}\n+++ b/{FILE}\n@@ -1 +1 @@\n-no\n+yes\n"
    grade = grader.grade(tasks[0], patch)
    assert grade.outcome == "F" and grade.reason.startswith("the diff does not apply")


def test_a_task_without_its_lists_is_not_graded(grader: Grader, tasks: list[Task]) -> None:
    with pytest.raises(LumoTreeError, match="has no FAIL_TO_PASS"):
        grader.grade(tasks[0].model_copy(update={"fail_to_pass": []}), "")


def test_the_workspace_has_neither_the_fix_nor_the_judging_tests(
    workspaces: Workspaces, tasks: list[Task]
) -> None:
    root = workspaces.pristine(tasks[0])
    assert "number * 3" in (root / FILE).read_text()
    text = (root / TEST_FILE).read_text()
    assert "test_double" not in text and "test_label" in text
    compile(text, TEST_FILE, "exec")
    assert not list(root.glob("*.dist-info"))
    assert workspaces.pristine(tasks[0]) == root
