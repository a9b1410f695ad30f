"""The command: options, faults in words, preparing, checking, computing, recording."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from replay.agent import workspace
from replay.cli import app
from replay.commands import agent_study
from tests.agent.conftest import DOUBLE, SmallWorkspaces


@pytest.fixture
def call(tiny_folder: Path, workspaces, sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Runs `lumotree agent-study` on the tiny tasks, in a folder of its own."""
    monkeypatch.setenv("LUMOTREE_CACHE", str(workspaces.cache))
    monkeypatch.setattr(workspace, "Workspaces", lambda cache, python: SmallWorkspaces(cache))
    monkeypatch.chdir(tmp_path)

    def run(*words: object):
        given = [str(word) for word in words]
        if "--resume" not in given:
            given = ["--tasks", str(tiny_folder), *given]
        return CliRunner().invoke(app, ["agent-study", *given])

    return run


def test_a_study_recorded_resumed_and_selected_from(call, tmp_path: Path) -> None:
    words = ("--task", "tiny-label", "--arms", "scripted", "--out", "run")
    done = call(*words, "--record", "all.jsonl", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["arms"]["scripted"]["resolved"] == 1 and found["contained"]
    assert "[1/1] scripted tiny-label: R" in done.stderr
    again = call("--resume", "run", "--quiet")
    assert again.exit_code == 0 and again.stderr == "" and "1 of 1" in again.stdout
    select = [
        "corpus",
        "select",
        "all.jsonl",
        "--rule",
        "proportional",
        "--n",
        "3",
        "--out",
        "s.jsonl",
    ]
    assert CliRunner().invoke(app, select).exit_code == 0
    assert json.loads((tmp_path / "s.manifest.json").read_text())["count"] == 3


def test_an_unavailable_arm_is_exit_code_one(call) -> None:
    done = call("--task", "tiny-label", "--arms", "openai:url=http://127.0.0.1:9", "--out", "run")
    assert done.exit_code == 1 and "no server reached" in done.stdout


def test_check_and_compute_and_prepare(call, tiny_folder: Path, tmp_path: Path) -> None:
    done = call("--task", "tiny-double", "--check")
    assert done.exit_code == 0
    assert done.stdout == "tiny-double: red before the fix, green after\n"
    path = tiny_folder / "tasks" / "tiny-double.json"
    before = path.read_text()
    task = json.loads(before)
    path.write_text(json.dumps({**task, "FAIL_TO_PASS": [], "PASS_TO_PASS": []}))
    try:
        assert call("--task", "tiny-double", "--compute").stdout.endswith("3 to mend, 2 to keep\n")
        assert json.loads(path.read_text())["FAIL_TO_PASS"] == DOUBLE
        path.write_text(
            json.dumps({**task, "FAIL_TO_PASS": ["tinypkg/tests/test_numbers.py::test_label"]})
        )
        wrong = call("--task", "tiny-double", "--check")
        assert wrong.exit_code == 1 and "1 tests pass before the fix" in wrong.stdout
    finally:
        path.write_text(before)
    ready = call("--task", "tiny-double", "--prepare")
    assert ready.exit_code == 0 and "tiny-double: ready" in ready.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("--budget", "0"), "--budget is 0; it takes seconds above 0"),
        (("--steps", "-1"), "--steps is -1"),
        (("--parallel", "0"), "--parallel is 0"),
        (("--task", "tiny"), None),
        (("--task", "nothing"), "no task and no set is called 'nothing'"),
        (("--arms", "lumo"), "unknown arm 'lumo'"),
        (("--arms", " "), "no arm is named"),
        (("--sandbox", "jail"), "unknown sandbox 'jail'"),
        (("--resume", "nowhere"), "nowhere is no folder of an agent study"),
        (("--resume", "a", "--out", "b"), "--resume and --out exclude each other"),
        (("--resume", "a", "--steps", "3"), "--resume and --steps exclude each other"),
        (("--max-context", "1"), "--max-context is 1; it takes a whole number from 2"),
        (("--max-tokens", "0"), "--max-tokens is 0; it takes a whole number from 1"),
    ],
)
def test_wrong_use_is_a_sentence(call, words: tuple, fault: str | None) -> None:
    if fault is None:
        assert call(*words, "--prepare", "--quiet").exit_code == 0
        return
    done = call(*words)
    assert done.exit_code == 2 and fault in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("name", ["all.jsonl", "all.manifest.json"])
def test_a_recording_is_not_written_over_nor_refused_late(call, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    done = call("--arms", "idle", "--out", "run", "--record", "all.jsonl")
    assert done.exit_code == 2 and f"--record: {name} exists" in done.stderr
    assert not (tmp_path / "run").exists() and (tmp_path / name).read_text() == "mine"


def test_a_study_goes_on_from_another_folder(
    call, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--tasks", os.path.relpath(tiny_folder), "--task", "tiny-label"]
    words = ["agent-study", *given, "--arms", "idle", "--out", "run", "--quiet"]
    assert CliRunner().invoke(app, words).exit_code == 0
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    done = call("--resume", tmp_path / "run")
    assert done.exit_code == 0, done.stderr


def test_max_context_is_handed_to_the_servers() -> None:
    options = agent_study._options({"max-context": 4096})
    assert options.server_options[:2] == ("--max-context", "4096")


def test_without_the_tasks_folder_it_says_what_to_name(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["agent-study"])
    assert done.exit_code == 2
    assert "corpora/astropy does not exist (name the tasks with --tasks)" in done.stderr


def test_running_uncontained_is_said(call) -> None:
    done = call("--task", "tiny-label", "--arms", "idle", "--sandbox", "none", "--out", "run")
    assert done.exit_code == 0 and "without a sandbox" in done.stderr
    assert "Commands were not contained in a sandbox." in done.stdout
