"""The committed corpora: frozen, readable, disjoint, free of traces of a machine, re-recordable."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from replay.agent.prompt import BASH_TOOL, SYSTEM_PROMPT
from replay.agent.script import read_script
from replay.corpus import load_corpus
from scripts.record.plan import PLANS, REPOSITORY, REVISION, Plan
from scripts.record.record import encode, record_script, rows

TASK_FILES = sorted((REPOSITORY / "scripts/record/tasks").glob("*/*.md"))
ABSOLUTE = re.compile(r"(?<![\w.])/(?:work|root|home|tmp|usr|opt|var|private|Users)\b")
# Commands whose output depends on the machine, the moment or the order of a directory.
UNSTABLE = re.compile(r"\bgrep -\w*r|\bfind |\bdate\b|\bls -\w*l|\$RANDOM|\bos\.getcwd")


def lines(plan: Plan) -> list[dict[str, Any]]:
    return [json.loads(line) for line in plan.path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(params=PLANS, ids=lambda plan: plan.name)
def plan(request: pytest.FixtureRequest) -> Plan:
    return request.param


def test_a_corpus_is_what_its_manifest_froze(plan: Plan) -> None:
    corpus = load_corpus(plan.path)  # checks count and sha256
    manifest = json.loads(plan.manifest_path.read_text(encoding="utf-8"))
    assert len(corpus.requests) == plan.requests == manifest["count"] == 43
    assert manifest["source_revision"] == REVISION
    captured = {script.name: script.requests for script in plan.scripts()}
    kept = Counter(request.conversation for request in corpus.requests)
    assert manifest["captured"] == sum(captured.values())
    assert manifest["conversations"] == {
        name: {"captured": captured[name], "kept": kept[name]} for name in captured
    }


def test_requests_are_in_capture_order(plan: Plan) -> None:
    order = [script.name for script in plan.scripts()]
    places = [
        (order.index(row["lumotree"]["conversation"]), row["lumotree"]["turn"])
        for row in lines(plan)
    ]
    assert places == sorted(set(places))


def test_bodies_are_chat_requests_with_valid_tool_calls(plan: Plan) -> None:
    for row in lines(plan):
        body, recorded = row["body"], row["lumotree"]
        assert (row["method"], row["url"]) == ("POST", "/v1/chat/completions")
        assert body["tools"] == [BASH_TOOL]
        assert body["messages"][0] == {"role": "system", "content": SYSTEM_PROMPT}
        assert recorded["recorded_at"] == len(body["messages"]) - 2
        open_calls: list[str] = []
        for message in [*body["messages"], recorded["completion"]]:
            if message["role"] == "tool":
                open_calls.remove(message["tool_call_id"])
            else:
                assert not open_calls, row["custom_id"]
            for call in message.get("tool_calls", []):
                arguments = json.loads(call["function"]["arguments"])
                assert list(arguments) == ["command"]
                open_calls.append(call["id"])


def test_turns_of_a_conversation_share_their_history(plan: Plan) -> None:
    last: dict[str, list] = {}
    for row in lines(plan):
        messages = row["body"]["messages"]
        earlier = last.get(row["lumotree"]["conversation"], [])
        assert messages[: len(earlier)] == earlier
        last[row["lumotree"]["conversation"]] = messages


def test_no_line_names_a_place_on_a_machine(plan: Plan) -> None:
    for line in plan.path.read_text(encoding="utf-8").splitlines():
        assert not (found := ABSOLUTE.search(line)), line[found.start() - 60 : found.end() + 60]


def test_the_corpora_are_disjoint() -> None:
    first, disjoint = (lines(plan) for plan in PLANS)

    def values(rows: list, *path: str) -> set[str]:
        found = set()
        for row in rows:
            for key in path:
                row = row[key]
            found.add(json.dumps(row, sort_keys=True))
        return found

    def said(rows: list, role: str) -> set[str]:
        messages = [message for row in rows for message in row["body"]["messages"]]
        return {m["content"] for m in messages if m["role"] == role}

    for path in (("lumotree", "task"), ("lumotree", "conversation"), ("body", "messages")):
        assert not values(first, *path) & values(disjoint, *path)
    assert not values(first, "lumotree", "completion") & values(disjoint, "lumotree", "completion")
    for role in ("user", "assistant"):
        assert not said(first, role) & said(disjoint, role)


@pytest.mark.parametrize("path", TASK_FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_tasks_run_no_command_of_unstable_output(path) -> None:
    for go in read_script(path).goes:
        for step in go.steps:
            found = UNSTABLE.search(step.command or "")
            assert not found, f"{path}: {found[0]}"


def test_recording_again_gives_the_same_lines() -> None:
    """One task of each corpus; `python -m scripts.record.record --check` does them all."""
    if sys.platform != "linux":
        pytest.skip("the tasks use GNU sed and grep")
    known = ["git", "-C", str(REPOSITORY), "cat-file", "-e", f"{REVISION}^{{commit}}"]
    if subprocess.run(known, capture_output=True).returncode:
        pytest.skip(f"this clone does not have the recorded revision {REVISION[:7]}")
    for plan, task in zip(PLANS, ("tree-comb-preset", "generation-rates"), strict=True):
        (script,) = (script for script in plan.scripts() if script.name == task)
        again = {row["custom_id"]: encode(row) for row in rows(script, record_script(script))}
        with plan.path.open(encoding="utf-8", newline="\n") as file:
            kept = [line for line in file if f'"conversation":"{task}"' in line]
        assert kept
        for line in kept:
            assert again[json.loads(line)["custom_id"]] == line
