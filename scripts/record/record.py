"""Records the corpora: runs every task, captures every request, selects, writes, freezes.

python -m scripts.record.record            # writes corpora/*.jsonl and their manifests
python -m scripts.record.record --check    # records again, compares with the manifests
python -m scripts.record.record --try scripts/record/tasks/first/errors-hint.md
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from replay.agent.loop import Exchange, command_of
from replay.agent.script import Script, ScriptError, read_script
from replay.corpus import CorpusRequest, parse_line
from replay.selection import select
from scripts.record.agent import run_script
from scripts.record.plan import PATHS, PLANS, REPOSITORY, REVISION, Plan
from scripts.record.workspace import MACHINE_PATH, Workspace, WorkspaceError

Row = dict[str, Any]

SELECTION = (
    "all captured requests, or as many as the plan keeps: shared out to conversations in "
    "proportion by largest remainder, evenly spaced in capture order (replay/selection.py)"
)


def record_script(script: Script, revision: str = REVISION) -> list[Exchange]:
    """Runs one task in a workspace of its own."""
    with tempfile.TemporaryDirectory(prefix="record-") as folder:
        return run_script(script, Workspace.create(REPOSITORY, revision, PATHS, Path(folder)))


def rows(script: Script, exchanges: list[Exchange]) -> list[Row]:
    """The corpus lines of a conversation. The clock is logical: a second for each message."""
    return [
        {
            "custom_id": f"{script.name}-{turn:02d}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": exchange.body,
            "lumotree": {
                "conversation": script.name,
                "turn": turn,
                "task": script.name,
                "recorded_at": len(exchange.body["messages"]) - 2,
                "completion": exchange.answer.message,
            },
        }
        for turn, exchange in enumerate(exchanges, start=1)
    ]


def encode(row: Row) -> str:
    """One line. Raises WorkspaceError when a path of a machine is in it."""
    line = json.dumps(row, ensure_ascii=False, separators=(",", ":"))
    if found := MACHINE_PATH.search(line):
        raise WorkspaceError(
            f"{row['custom_id']} names {line[found.start() - 40 : found.end() + 40]!r}"
        )
    return line + "\n"


def record(plan: Plan) -> tuple[str, Row]:
    """The corpus text and its manifest."""
    lines: dict[str, str] = {}
    captured: list[CorpusRequest] = []
    for script in plan.scripts():
        for row in rows(script, record_script(script)):
            line = lines[row["custom_id"]] = encode(row)
            captured.append(parse_line(line.encode(), len(lines), plan.path))
    kept = select(captured, plan.requests)
    text = "".join(lines[request.request_id] for request in kept)
    of_captured = Counter(request.conversation for request in captured)
    of_kept = Counter(request.conversation for request in kept)
    manifest = {
        "schema_version": 1,
        "corpus": plan.path.name,
        "count": len(kept),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "captured": len(captured),
        "selection": SELECTION,
        "conversations": {
            name: {"captured": count, "kept": of_kept[name]} for name, count in of_captured.items()
        },
        "source_revision": REVISION,
        "recorded_with": environment(),
        "recorder": "python -m scripts.record.record",
    }
    return text, manifest


def environment() -> dict[str, str]:
    """What else shapes the output of commands: the versions whose messages tasks print."""
    names = ("pytest", "pydantic", "hypothesis")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"python": python, **{name: version(name) for name in names}}


def write(plan: Plan) -> None:
    text, manifest = record(plan)
    plan.path.write_text(text, encoding="utf-8", newline="\n")
    plan.manifest_path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    print(
        f"{plan.path.name}: {manifest['count']} of {manifest['captured']} requests",
        file=sys.stderr,
    )


def check(plan: Plan) -> bool:
    """Whether a fresh recording has the frozen manifest, and the file has its hash."""
    _, fresh = record(plan)
    frozen = json.loads(plan.manifest_path.read_text(encoding="utf-8"))
    on_disk = hashlib.sha256(plan.path.read_bytes()).hexdigest()
    parts = [key for key in fresh if key != "recorded_with"]
    wrong = [key for key in parts if fresh[key] != frozen.get(key)]
    if on_disk != frozen["sha256"]:
        wrong.append("the file's own hash")
    verdict = f"differs in {', '.join(wrong)}" if wrong else "the same"
    if wrong and fresh["recorded_with"] != frozen["recorded_with"]:
        verdict += f"; recorded with {frozen['recorded_with']}, this is {fresh['recorded_with']}"
    print(f"{plan.path.name}: {verdict}", file=sys.stderr)
    return not wrong


def show(path: Path) -> None:
    """Runs one task and prints it as a reader would follow it."""
    exchanges = record_script(read_script(path))
    for turn, exchange in enumerate(exchanges, start=1):
        size = sum(len(str(message)) for message in exchange.body["messages"])
        answer = exchange.answer.message
        print(f"--- turn {turn}, about {size} characters of messages\n{answer['content']}")
        for call, result in zip(answer.get("tool_calls", []), exchange.results, strict=True):
            print(f"{command_of(call)}\n=> {result.exit_code}\n{result.output}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="compare a fresh recording with the manifests"
    )
    parser.add_argument(
        "--try", dest="task", type=Path, help="run one task and print it; writes nothing"
    )
    options = parser.parse_args()
    try:
        if options.task:
            show(options.task)
        elif options.check:
            return 0 if all([check(plan) for plan in PLANS]) else 1
        else:
            for plan in PLANS:
                write(plan)
    except (ScriptError, WorkspaceError) as error:
        print(f"record: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
