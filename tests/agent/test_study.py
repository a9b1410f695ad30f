"""Whole studies of tiny tasks: scripted and idle agents, kill and resume, what is written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lumotree.errors import ArmError, CorpusError
from replay.agent.servers import arm_names, make_arm
from replay.agent.store import StudyFolder
from replay.corpus import load_corpus
from replay.formats.reading import read_foreign
from replay.formats.writing import write_corpus
from tests.agent.conftest import FAULTS, SCRIPT
from tests.agent.small_study import small_study

NAMES = sorted(FAULTS)


@pytest.fixture(scope="module")
def cache(workspaces) -> Path:
    return workspaces.cache


@pytest.fixture(scope="module")
def done(tiny_folder: Path, cache: Path, sandbox, tmp_path_factory) -> Path:
    """A finished study of the scripted and the idle agent."""
    folder = tmp_path_factory.mktemp("study") / "run"
    small_study(tiny_folder, cache, folder, "scripted idle").run()
    return folder


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def test_the_scripted_agent_resolves_all_and_the_idle_one_nothing(done: Path) -> None:
    arms = summary(done)["arms"]
    assert arms["scripted"]["resolved"] == arms["scripted"]["tasks"] == 3
    assert arms["idle"]["outcomes"] == {"R": 0, "F": 0, "E": 3, "X": 0}
    assert (arms["scripted"]["requests"], arms["idle"]["requests"]) == (15, 3)
    for arm in arms.values():
        assert arm["warnings"] == [] and arm["tok_s"] is None
        minutes = arm["minutes"]
        assert minutes["model"] + minutes["tools"] == pytest.approx(minutes["total"])
        assert minutes["grading"] >= 0


def test_counters_of_each_task_are_those_of_its_requests(done: Path) -> None:
    for row in StudyFolder.open(done).rows():
        seen = row["counters"]
        assert seen["faults"] == []
        assert seen["difference"]["requests"] == row["requests"]
        assert seen["difference"]["generation_tokens"] == row["completion_tokens"]


def test_the_table_has_the_papers_columns_and_a_caution(done: Path) -> None:
    text = (done / "study.md").read_text()
    columns = "| arm | resolved | requests | rate, tok/s | time, minutes | output tokens |"
    assert columns in text and "| scripted | 3 of 3 | 15 | – |" in text
    assert "| tiny-double | R | E |" in text
    assert "One attempt per task and arm" in text and "over 3 tasks" in text
    assert "scripted 3 of 3, idle 0 of 3" in (done / "report.html").read_text()


def test_trajectories_are_mini_swe_agents_and_read_back_as_the_same_requests(done: Path) -> None:
    path = done / "attempts/scripted/tiny-double.traj.json"
    written = json.loads(path.read_text())
    assert written["trajectory_format"] == "mini-swe-agent-1.1"
    assert written["info"]["model_stats"]["api_calls"] == 5
    assert written["info"]["exit_status"] == "Submitted"
    parts = {"agent", "model", "environment"}
    assert written["info"]["config"].keys() == parts | {f"{part}_type" for part in parts}
    assert written["info"]["submission"].startswith("diff --git a/tinypkg/numbers.py")
    roles = [message["role"] for message in written["messages"]]
    assert roles == ["system", "user", *["assistant", "tool"] * 4, "assistant", "exit"]
    for message in written["messages"][2:-2:2]:
        assert [action["command"] for action in message["extra"]["actions"]]
    codes = [m["extra"]["returncode"] for m in written["messages"] if m["role"] == "tool"]
    assert codes == [0, 3, 0, 0]
    lines = read_foreign(path, None).lines
    recorded = (done / "recorded/scripted/tiny-double.jsonl").read_text().splitlines()
    assert [line["body"]["messages"] for line in lines] == [
        json.loads(line)["body"]["messages"] for line in recorded
    ]


def test_predictions_are_swe_benchs(done: Path) -> None:
    found = json.loads((done / "scripted.preds.json").read_text())
    assert sorted(found) == NAMES
    for name, entry in found.items():
        assert set(entry) == {"instance_id", "model_name_or_path", "model_patch"}
        assert entry["instance_id"] == name and entry["model_patch"]
    idle = json.loads((done / "idle.preds.json").read_text())
    assert {entry["model_patch"] for entry in idle.values()} == {""}


def test_the_study_is_a_corpus(done: Path) -> None:
    corpus = load_corpus(done / "scripted.jsonl")
    assert [request.conversation for request in corpus.requests] == [
        n for n in NAMES for _ in "12345"
    ]
    assert [request.turn for request in corpus.requests] == [1, 2, 3, 4, 5] * 3
    line = json.loads((done / "scripted.jsonl").read_text().splitlines()[1])
    assert line["body"]["messages"][-1]["content"].startswith("exit code: 0\n")
    assert "stream" not in line["body"] and line["body"]["max_tokens"] == 24_000


def test_recordings_are_the_same_every_time_and_name_no_place(
    done: Path, tiny_folder: Path, tmp_path: Path, sandbox
) -> None:
    """Another cache, another folder, another moment."""
    small_study(tiny_folder, tmp_path / "cache", tmp_path / "again", "scripted").run()
    again = (tmp_path / "again/scripted.jsonl").read_bytes()
    assert again == (done / "scripted.jsonl").read_bytes()
    assert str(tmp_path).encode() not in again and b"/tmp" not in again


def test_requests_of_several_arms_in_one_corpus(done: Path, tmp_path: Path) -> None:
    lines = StudyFolder.open(done).recorded(["scripted", "idle"])
    write_corpus(lines, tmp_path / "all.jsonl", {})
    names = {request.conversation for request in load_corpus(tmp_path / "all.jsonl").requests}
    assert names == {f"{arm}/{name}" for arm in ("scripted", "idle") for name in NAMES}


def test_a_killed_study_goes_on_where_it_was(
    tiny_folder: Path, cache: Path, tmp_path: Path, sandbox
) -> None:
    folder = tmp_path / "run"
    words = [
        sys.executable,
        "-m",
        "tests.agent.small_study",
        tiny_folder,
        cache,
        folder,
        "scripted",
    ]
    process = subprocess.Popen(words, start_new_session=True, stderr=subprocess.DEVNULL)
    rows = folder / "attempts.jsonl"
    deadline = time.monotonic() + 120
    while not (rows.exists() and rows.read_bytes().count(b"\n") == 1):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    kept = rows.read_bytes()
    assert kept.count(b"\n") == 1
    # What a kill in the middle of a write would leave.
    rows.write_bytes(kept + b'{"arm": "scr')
    small_study(tiny_folder, cache, folder, "scripted", resume=True).run()
    after = rows.read_bytes()
    assert after.startswith(kept) and after.count(b"\n") == 3
    assert [json.loads(line)["task"] for line in after.splitlines()] == NAMES
    assert summary(folder)["arms"]["scripted"]["resolved"] == 3


def test_a_finished_study_repeats_nothing(done: Path, tiny_folder: Path, cache: Path) -> None:
    before = (done / "attempts.jsonl").read_bytes()
    small_study(tiny_folder, cache, done, "scripted idle", resume=True).run()
    assert (done / "attempts.jsonl").read_bytes() == before


def test_another_study_is_not_resumed(done: Path, tiny_folder: Path, cache: Path) -> None:
    with pytest.raises(CorpusError, match="cannot be resumed: options seed was 0, now it is 1"):
        small_study(tiny_folder, cache, done, "scripted idle", resume=True, seed=1)
    with pytest.raises(CorpusError, match="exists and is not empty"):
        small_study(tiny_folder, cache, done, "scripted idle")


def test_a_server_that_fails_is_no_attempt_and_is_run_again(
    tiny_folder: Path, cache: Path, tmp_path: Path, sandbox
) -> None:
    script = tiny_folder / "scripts" / "tiny-label.md"
    script.write_text(SCRIPT.replace("agent, exit 3", "agent, exit 4"))
    folder = tmp_path / "run"
    try:
        found = small_study(tiny_folder, cache, folder, "scripted").run()
    finally:
        script.write_text(SCRIPT)
    arm = found["arms"]["scripted"]
    assert arm["outcomes"] == {"R": 2, "F": 0, "E": 0, "X": 1} and arm["attempts"] == 2
    assert "'exit code: 3' where 'exit code: 4' was due" in arm["cells"]["tiny-label"]["reason"]
    again = small_study(tiny_folder, cache, folder, "scripted", resume=True).run()
    assert again["arms"]["scripted"]["outcomes"]["R"] == 3


def test_tasks_beside_one_another(tiny_folder: Path, cache: Path, tmp_path: Path, sandbox) -> None:
    found = small_study(tiny_folder, cache, tmp_path / "run", "scripted", parallel=3).run()
    arm = found["arms"]["scripted"]
    assert arm["resolved"] == 3 and arm["warnings"] == []
    known = json.loads((tmp_path / "run/run.json").read_text())["arms"]["scripted"]
    assert known["segments"][0]["difference"]["requests"] == 15


def test_an_arm_that_is_not_there_is_a_row_with_a_reason(
    tiny_folder: Path, cache: Path, tmp_path: Path, sandbox
) -> None:
    arms = "openai:url=http://127.0.0.1:9 idle"
    found = small_study(tiny_folder, cache, tmp_path / "run", arms).run()["arms"]
    missing = found["openai:url=http://127.0.0.1:9"]
    assert missing["status"] == "unavailable" and "no server reached" in missing["reason"]
    assert missing["requests"] is None and found["idle"]["outcomes"]["E"] == 3


def test_an_external_agent(tiny_folder: Path, cache: Path, tmp_path: Path, sandbox) -> None:
    agent = (
        'test -s "$LUMOTREE_PROBLEM_FILE" && '
        'sed -i "s/number \\* 3/number * 2/" tinypkg/numbers.py && '
        "python - <<'EOF'\n"
        "import json, os, urllib.request\n"
        'words = open(os.environ["LUMOTREE_PROBLEM_FILE"]).read()\n'
        'messages = [{"role": "user", "content": words}]\n'
        'body = {"model": os.environ["LUMOTREE_MODEL"], "messages": messages}\n'
        "data = json.dumps(body).encode()\n"
        'url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"\n'
        "request = urllib.request.Request(url, data)\n"
        "print(urllib.request.urlopen(request).read())\n"
        "EOF"
    )
    found = small_study(tiny_folder, cache, tmp_path / "run", "idle", agent_cmd=agent).run()
    arm = found["arms"]["idle"]
    assert not found["contained"]
    assert arm["cells"]["tiny-double"]["outcome"] == "R", arm
    assert arm["resolved"] == 1 and arm["requests"] == 3


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("lumotree,mtp-5,ar", ["lumotree", "mtp-5", "ar"]),
        ("ar,lumotree:passes=3,suffix=off  idle", ["ar", "lumotree:passes=3,suffix=off", "idle"]),
        (
            "lumotree:passes=3,tree=chain-3 openai:model=m,url=http://h:1",
            ["lumotree:tree=chain-3,passes=3", "openai:url=http://h:1,model=m"],
        ),
        ("openai:url=http://h:1,model=m scripted", ["openai:url=http://h:1,model=m", "scripted"]),
    ],
)
def test_arms_are_separated_by_spaces_or_commas(text: str, names: list[str]) -> None:
    assert arm_names(text) == names


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ("lumo", "unknown arm 'lumo'"),
        ("scripted:x=1", "arm 'scripted' has no option 'x'"),
        ("openai:api=completions", "api= means nothing to a study"),
        ("openai:url=http://a:1+http://b:1", "asks one server"),
        ("openai:port=1", "has no option 'port'"),
        ("openai:url=somewhere", "it takes an address such as"),
        ("openai:key=NO_SUCH_VARIABLE", "no environment variable NO_SUCH_VARIABLE"),
    ],
)
def test_arms_that_mean_nothing_are_refused(spec: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(ArmError, match=fault):
        make_arm(spec, [], [], tmp_path)


def test_no_arm_is_named_twice() -> None:
    with pytest.raises(ArmError, match="'ar' is named twice"):
        arm_names("ar,mtp-5,ar")
    with pytest.raises(ArmError, match="'lumotree:tree=chain-3,passes=3' is named twice"):
        arm_names("lumotree:passes=3,tree=chain-3 lumotree:tree=chain-3,passes=3")


def test_an_arms_server_has_the_name_of_its_rows(tmp_path: Path) -> None:
    (name,) = arm_names("lumotree:passes=3,tree=chain-3")
    assert make_arm(name, [], [], tmp_path).name == name


def test_a_password_in_an_address_is_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(ArmError, match="has an @") as caught:
        make_arm("openai:url=http://me:secret@h:1", [], [], tmp_path)
    assert "secret" not in f"{caught.value} {caught.value.hint}"


def test_a_server_has_as_many_slots_as_tasks_run_at_a_time(
    tiny_folder: Path, cache: Path, tmp_path: Path, sandbox
) -> None:
    study = small_study(
        tiny_folder,
        cache,
        tmp_path / "run",
        "ar",
        parallel=3,
        server_options=("--threads", "1"),
    )
    seen = []

    def make(name: str, tasks: list, options: tuple, logs: Path):
        seen.append(options)
        return make_arm("openai:url=http://127.0.0.1:9", tasks, options, logs)

    study.make = make
    study.run()
    assert seen == [("--threads", "1", "--active", "3")]


def test_recordings_and_diffs_keep_every_character(tmp_path: Path) -> None:
    """Line separators within JSON text end no line; a diff's line ends and bytes are its own."""
    folder = StudyFolder.create(tmp_path / "run", {})
    folder.append({"arm": "a", "task": "t", "error": None})
    line = {"custom_id": "t", "text": "x\u2028y\u0085z"}
    encoded = json.dumps(line, ensure_ascii=False) + "\n"
    folder.write(folder.place("recorded", "a", "t.jsonl"), encoded)
    assert folder.recorded(["a"]) == [line]
    folder.write(folder.place("attempts", "a", "t.diff"), "+a\r\n+\udcff\n")
    folder.write_predictions("a")
    found = json.loads((tmp_path / "run/a.preds.json").read_bytes())
    assert found["t"]["model_patch"] == "+a\r\n+\udcff\n"


def test_a_trajectory_is_json_whatever_the_diff_holds(
    tiny_folder: Path, cache: Path, tmp_path: Path, sandbox
) -> None:
    script = tiny_folder / "scripts" / "tiny-label.md"
    kept = script.read_text()
    script.write_text(kept.replace("exit 3\n````", "printf '\\377\\n' > raw.txt; exit 3\n````"))
    try:
        small_study(tiny_folder, cache, tmp_path / "run", "scripted").run()
    finally:
        script.write_text(kept)
    written = json.loads((tmp_path / "run/attempts/scripted/tiny-label.traj.json").read_bytes())
    assert "\n+\udcff\n" in written["info"]["submission"]
