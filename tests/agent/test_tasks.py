"""Task files: what they may say, the shipped twenty, and SWE-bench rows."""

from __future__ import annotations

import ast
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lumotree.errors import LumoTreeError
from replay.agent import cache
from replay.agent.cache import environment, read_environment, wheel
from replay.agent.grading import Grader
from replay.agent.patch import commit_all, git
from replay.agent.scripted import task_scripts
from replay.agent.swebench import patched_files
from replay.agent.tasks import Edit, load_task, load_tasks, save_task
from replay.agent.workspace import strip_tests
from tests.agent.conftest import MODULE, TEST_FILE, TESTS

ASTROPY = Path(__file__).resolve().parents[2] / "corpora" / "astropy"
SHIPPED = load_tasks([ASTROPY])
TASK = {
    "id": "t",
    "workspace": {"wheel": "x.whl"},
    "problem_statement": "Mend it.",
    "test_files": ["tests/test_x.py"],
}


def write(folder: Path, **changes: object) -> Path:
    path = folder / "t.json"
    path.write_text(json.dumps({**TASK, **changes}))
    return path


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"id": "../t"}, "id"),
        ({"problem_statement": ""}, "problem_statement"),
        ({"workspace": {}}, "one of requirement, wheel and mirror"),
        ({"workspace": {"requirement": "a"}}, "NAME==VERSION"),
        ({"workspace": {"requirement": "a==1"}}, "sha256"),
        ({"workspace": {"mirror": "m"}}, "needs a commit"),
        ({"setup": [{"file": "a"}]}, "'old'"),
        ({"setup": [{"file": "a", "old": "x", "remove": True}]}, "'remove'"),
        ({"colour": "red"}, "colour"),
        ({"schema_version": 2}, "schema_version"),
    ],
)
def test_a_faulty_task_is_named(tmp_path: Path, changes: dict, fault: str) -> None:
    with pytest.raises(LumoTreeError, match=fault) as caught:
        load_task(write(tmp_path, **changes))
    assert "t.json" in str(caught.value)


def test_a_task_is_saved_as_it_was_read(tmp_path: Path) -> None:
    path = write(tmp_path, FAIL_TO_PASS=["a::b"], setup=[{"file": "f", "old": "x", "new": ""}])
    task = load_task(path)
    save_task(task, path)
    assert load_task(path) == task
    assert "tests_from" not in json.loads(path.read_text())


def test_choosing_by_id_and_set() -> None:
    assert (
        len(load_tasks([ASTROPY], ["release"])) == len(load_tasks([ASTROPY], ["mutations"])) == 10
    )
    two = load_tasks([ASTROPY], ["astropy-b1-cdot", "astropy-14365", "astropy-b1-cdot"])
    assert [task.id for task in two] == ["astropy-b1-cdot", "astropy-14365"]
    with pytest.raises(LumoTreeError, match="called 'astropy-1'") as caught:
        load_tasks([ASTROPY], ["astropy-1"])
    assert "sets: mutations, release" in caught.value.hint


def test_edits_fit_once_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("one two two\n")
    Edit(file="f", old="one", new="1").apply(tmp_path)
    assert (tmp_path / "f").read_text() == "1 two two\n"
    for old in ("two", "three"):
        with pytest.raises(LumoTreeError, match=r"f holds the text to edit (2|0) times, not once"):
            Edit(file="f", old=old, new="x").apply(tmp_path)
    Edit(file="f", remove=True).apply(tmp_path)
    with pytest.raises(LumoTreeError, match="f cannot be edited"):
        Edit(file="f", old="1", new="x").apply(tmp_path)


def test_stripped_tests_are_gone_and_the_rest_is_whole() -> None:
    ids = [f"{TEST_FILE}::TestDouble::test_double[1]", f"{TEST_FILE}::test_label"]
    text = strip_tests(TESTS, ids)
    kept = {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}
    assert kept == {"test_shorten", "test_skipped"}
    assert "parametrize" not in text and "class TestDouble" in text
    assert strip_tests(TESTS, []) == TESTS


# The shipped tasks.


def test_the_shipped_tasks_are_twenty_and_complete() -> None:
    assert len(SHIPPED) == 20
    for task in SHIPPED:
        assert task.fail_to_pass and task.pass_to_pass, task.id
        assert not set(task.fail_to_pass) & set(task.pass_to_pass)
        assert all(name.partition("::")[0] in task.test_files for name in task.fail_to_pass)
        assert task.reference_fix and task.set in ("release", "mutations")
        for source in (task.workspace, task.hidden):
            assert re.fullmatch(r"astropy==5\.\d(\.\d)?", source.requirement)
            assert all(re.fullmatch("[0-9a-f]{64}", sha256) for sha256 in source.sha256)


def test_statements_do_not_name_the_file_or_the_fix() -> None:
    for task in SHIPPED:
        for edit in task.reference_fix:
            assert edit.file not in task.problem_statement, task.id
            added = set(edit.new.splitlines()) - set(edit.old.splitlines())
            long = [line.strip() for line in added if len(line.strip()) > 25]
            assert not any(line in task.problem_statement for line in long), task.id


def test_every_shipped_task_has_a_script_that_fixes_looks_and_tests() -> None:
    for task, script in zip(SHIPPED, task_scripts(SHIPPED), strict=True):
        (go,) = script.goes
        commands = [step.command for step in go.steps]
        assert commands.count(task.fix_command()) == 1 and commands[-1] is None
        assert any("pytest" in (command or "") for command in commands)
        compile(task.fix_command().split("\n", 1)[1].rsplit("\n", 1)[0], task.id, "exec")


def test_scripts_run_no_command_of_unstable_output() -> None:
    unstable = re.compile(r"\bgrep -\w*r|\bfind |\bdate\b|\bls -\w*l|git log|\$RANDOM|time\.time")
    for script in task_scripts(SHIPPED):
        for step in script.goes[0].steps:
            assert not unstable.search(step.command or ""), (script.name, step.command)


def test_the_environment_is_pinned() -> None:
    spec = read_environment(ASTROPY / "environment.json")
    assert spec.python == "3.11" and "pytest==7.4.4" in spec.requirements
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in spec.requirements)


def test_a_wheel_of_another_hash_is_not_taken_from_the_cache(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "a-1-py3-none-any.whl").write_bytes(b"another file")
    asked = []
    monkeypatch.setattr("replay.agent.cache.pip", lambda argv, what: asked.append(argv))
    with pytest.raises(ValueError):  # nothing was downloaded by the stand-in
        wheel("a==1", ["0" * 64], tmp_path)
    assert "a==1" in asked[0]


def test_one_environment_is_made_once(tmp_path: Path, monkeypatch) -> None:
    spec = tmp_path / "environment.json"
    spec.write_text(json.dumps({"python": "3.11", "requirements": []}))
    made = []

    def pip(argv: list[str], what: str) -> None:
        if "venv" in argv:
            time.sleep(0.1)
            Path(argv[-1]).mkdir()
            made.append(argv[-1])

    monkeypatch.setattr(cache, "pip", pip)
    monkeypatch.setattr(cache, "describe", lambda folder: folder)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: environment(spec, tmp_path, "python"), range(4)))
    assert len(set(found)) == len(made) == 1 and (found[0] / cache.DONE).exists()


# SWE-bench rows.


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    mirror = tmp_path / "mirror"
    (mirror / "tinypkg/tests").mkdir(parents=True)
    (mirror / "tinypkg/__init__.py").write_text("")
    (mirror / "tinypkg/numbers.py").write_text(MODULE.replace("number * 2", "number * 3"))
    (mirror / "tinypkg/tests/__init__.py").write_text("")
    commit = commit_all(mirror)
    (mirror / TEST_FILE).write_text(TESTS)
    git("add", "-A", folder=mirror)
    patch = git("diff", "--cached", folder=mirror).decode()
    git("reset", "-q", "--hard", folder=mirror)
    row = {
        "instance_id": "tiny__tiny-1",
        "repo": "tiny/tiny",
        "base_commit": commit,
        "problem_statement": "double(2) is 6.",
        "test_patch": patch,
        "FAIL_TO_PASS": json.dumps([f"{TEST_FILE}::TestDouble::test_double[2]"]),
        "PASS_TO_PASS": json.dumps([f"{TEST_FILE}::test_label"]),
    }
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (tmp_path / "rows.defaults.json").write_text(json.dumps({"mirror": "mirror"}))
    return path


def test_rows_with_a_mirror_are_tasks(rows: Path, grader: Grader) -> None:
    (task,) = load_tasks([rows])
    assert task.test_files == [TEST_FILE] and task.id == "tiny__tiny-1"
    outcomes, fault = grader.run_tests(task)
    assert fault is None and outcomes[task.fail_to_pass[0]] == "failed"
    assert outcomes[task.pass_to_pass[0]] == "passed"
    assert not (grader.workspaces.pristine(task) / TEST_FILE).exists()
    edit = Edit(file="tinypkg/numbers.py", old="number * 3", new="number * 2")
    after, _ = grader.run_tests(task, edits=[edit])
    assert after[task.fail_to_pass[0]] == "passed"


def test_only_line_feeds_end_a_row(rows: Path) -> None:
    text = "a\u2028b\u0085c"
    row = json.loads(rows.read_text()) | {"problem_statement": text}
    rows.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    (task,) = load_tasks([rows])
    assert task.problem_statement == text


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"mirror": ""}, "line 1 names no mirror"),
        ({"test_patch": ""}, "line 1 is no SWE-bench row: it has no test_patch"),
    ],
)
def test_rows_that_lack_something_are_named(rows: Path, change: dict, fault: str) -> None:
    row = json.loads(rows.read_text()) | change
    rows.write_text(json.dumps(row) + "\n")
    with pytest.raises(LumoTreeError, match=fault):
        load_tasks([rows])


def test_files_of_a_patch() -> None:
    patch = "--- a/x\n+++ b/x\n@@ @@\n--- /dev/null\n+++ b/d/y z\t\n--- a/gone\n+++ /dev/null\n"
    assert patched_files(patch) == ["x", "d/y z"]
