"""The recorder's parts: task files, the workspace, the agent loop."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from replay.agent.loop import Answer, converse
from replay.agent.script import ScriptError, parse_script
from replay.agent.shell import cap
from scripts.record.agent import REQUEST, run_script
from scripts.record.record import encode, rows
from scripts.record.workspace import Workspace, WorkspaceError

TASK = """\
## user
Please greet.
## agent
I look first.
````sh
cat greeting.txt
## user
````
## agent, exit 3
That fails.
````sh
exit 3
````
## done
Greeted.
## user
And once more?
## done
No.
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A workspace of a repository with one file."""
    repository = tmp_path / "upstream"
    repository.mkdir()
    (repository / "greeting.txt").write_text("hello\n")
    git = ["git", "-C", str(repository), "-c", "user.name=d", "-c", "user.email=d@example.com"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "start"]):
        subprocess.run([*git, *arguments], check=True)
    return Workspace.create(repository, "HEAD", (".",), tmp_path)


def test_a_task_file_becomes_goes_and_steps() -> None:
    script = parse_script("greet", TASK)
    assert [go.user for go in script.goes] == ["Please greet.", "And once more?"]
    look, fail, done = script.goes[0].steps
    assert look.command == "cat greeting.txt\n## user"
    assert (fail.say, fail.exit_code, done.command) == ("That fails.", 3, None)
    assert script.requests == 4


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("words\n## user\nhi\n", "before the first heading"),
        ("## agent\nhi\n", "nobody asked"),
        ("## user\nhi\n## user\nhi\n", "before the agent was done"),
        ("## user\nhi\n", "must be '## done'"),
        ("## user\nhi\n## agent\nno command\n", "one fenced command"),
        ("## user\nhi\n## done\n\n", "not empty"),
        ("## user\nhi\n## agent\nopen\n````sh\ntrue\n", "left open"),
    ],
)
def test_a_faulty_task_file_is_named(text: str, fault: str) -> None:
    with pytest.raises(ScriptError, match=fault) as caught:
        parse_script("broken", text)
    assert "broken" in str(caught.value)


def test_history_grows_by_answer_and_output(workspace: Workspace) -> None:
    script = parse_script("greet", TASK.replace("\n## user\n````", "\n````"))
    exchanges = run_script(script, workspace)
    assert [len(e.body["messages"]) for e in exchanges] == [2, 4, 6, 8]
    roles = [message["role"] for message in exchanges[-1].body["messages"]]
    assert roles == ["system", "user", *["assistant", "tool"] * 2, "assistant", "user"]
    outputs = [m["content"] for m in exchanges[-1].body["messages"] if m["role"] == "tool"]
    assert outputs == ["exit code: 0\nhello", "exit code: 3"]
    for exchange in exchanges[:2]:
        (call,) = exchange.answer.message["tool_calls"]
        assert list(json.loads(call["function"]["arguments"])) == ["command"]


def test_bodies_are_not_changed_by_later_turns(workspace: Workspace) -> None:
    """A captured body is what was sent then, not a view of the growing history."""
    answers = iter(
        [
            {
                "role": "assistant",
                "content": "one",
                "tool_calls": [_call("echo 1"), _call("echo 2")],
            },
            {"role": "assistant", "content": "two"},
        ]
    )
    first, second = converse(["go"], lambda body: Answer(next(answers)), workspace, REQUEST)
    assert len(first.body["messages"]) == 2
    assert [m["content"][-1] for m in second.body["messages"][-2:]] == ["1", "2"]


def _call(command: str) -> dict:
    arguments = json.dumps({"command": command})
    return {"id": command, "type": "function", "function": {"name": "bash", "arguments": arguments}}


def test_an_unexpected_exit_code_stops_the_recording(workspace: Workspace) -> None:
    script = parse_script(
        "greet", TASK.replace("exit 3\n````", "exit 4\n````").replace("\n## user\n````", "\n````")
    )
    with pytest.raises(ScriptError, match="turn 2: exit code 4 where 3 was due"):
        run_script(script, workspace)


def test_output_has_neither_paths_nor_durations(workspace: Workspace) -> None:
    assert workspace.run("pwd; echo $PWD/greeting.txt").output == ".\ngreeting.txt\n"
    assert workspace.run("echo '4 passed in 0.12s'").output == "4 passed\n"
    with pytest.raises(WorkspaceError, match="names a path of this machine"):
        workspace.run("command -v python")


def test_the_shell_sees_nothing_of_the_caller(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "shown")
    assert (
        workspace.run('echo "[$SECRET]"; git log --format="%an %s"').output
        == "[]\ndeveloper Start of the task\n"
    )


def test_long_output_loses_its_middle() -> None:
    text = "a" * 3000 + "b" * 3000
    short = cap(text, 1000)
    assert short == "a" * 500 + "\n[5000 characters left out]\n" + "b" * 500
    assert cap("short", 1000) == "short"


def test_recording_twice_gives_the_same_bytes(tmp_path: Path, workspace: Workspace) -> None:
    """Another folder, another moment: the lines are equal, hashes of commits included."""
    script = parse_script(
        "twice",
        "## user\nCommit a file.\n## agent\nI do.\n````sh\n"
        "echo here > here.txt; git add -A; git commit -q -m here; git log --format='%h %ad'; pwd\n"
        "````\n## done\nDone.\n",
    )
    other = tmp_path / "elsewhere"
    other.mkdir()
    again = Workspace.create(tmp_path / "upstream", "HEAD", (".",), other)
    first, second = (
        "".join(map(encode, rows(script, run_script(script, place))))
        for place in (workspace, again)
    )
    assert first == second
