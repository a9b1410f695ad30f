"""A study on disk: run.json, attempts.jsonl, and what each attempt left. Safe against a kill.

run.json            what was asked for, machine, versions, arms
attempts.jsonl      one row per attempt that ended, appended when everything else is on disk
attempts/ARM/TASK.traj.json, TASK.diff     the trajectory and the agent's diff
recorded/ARM/TASK.jsonl                    its requests as corpus lines
ARM.preds.json, ARM.jsonl, summary.json, study.md, report.html     made from these at the end
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lumotree.errors import CorpusError
from replay.agent.trajectory import prediction
from replay.formats.writing import write_corpus
from replay.runfolder import difference

SCHEMA_VERSION = 1
KIND = "agent-study"
# A resumed study continues one experiment: these parts of run.json must not differ.
SAME = ("options", "tasks")

Row = dict[str, Any]


class StudyFolder:
    """`create` or `resume` for writing, `open` for reading."""

    def __init__(self, path: Path, run: dict[str, Any]) -> None:
        self.path, self.run = path, run

    @classmethod
    def create(cls, path: Path, run: dict[str, Any]) -> StudyFolder:
        """A new folder. Raises CorpusError when the place holds something already."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise CorpusError(f"{path} exists and is not empty", "continue it with --resume")
        folder = cls(path, {"schema_version": SCHEMA_VERSION, "kind": KIND, **run})
        folder.write_run()
        return folder

    @staticmethod
    def is_study(path: Path) -> bool:
        """Whether the folder says that it is a study, of whatever version."""
        try:
            return json.loads((path / "run.json").read_bytes())["kind"] == KIND
        except (OSError, ValueError, KeyError, TypeError):
            return False

    @classmethod
    def open(cls, path: Path) -> StudyFolder:
        """An existing study. Raises CorpusError."""
        known = cls.is_study(path)
        if known:
            run = json.loads((path / "run.json").read_bytes())
            known = run.get("schema_version") == SCHEMA_VERSION
        if not known:
            raise CorpusError(f"{path} is no folder of an agent study that this version reads")
        return cls(path, run)

    def check_same(self, run: dict[str, Any]) -> None:
        """Raises CorpusError naming what differs from the study that is resumed."""
        for part in SAME:
            if self.run.get(part) != run[part]:
                what = difference(part, self.run.get(part), run[part])
                raise CorpusError(f"{self.path} cannot be resumed: {what}", "start a new study")

    def rows(self) -> list[Row]:
        """The last row of each (arm, task), in order of their first ones; a torn line is no row."""
        try:
            data = (self.path / "attempts.jsonl").read_bytes()
        except FileNotFoundError:
            return []
        found: dict[tuple[str, str], Row] = {}
        for line in data.split(b"\n")[:-1]:
            row = json.loads(line)
            found[row["arm"], row["task"]] = row
        return list(found.values())

    def finished(self) -> set[tuple[str, str]]:
        """The (arm, task) that need not be run again: those no server spoiled."""
        return {(row["arm"], row["task"]) for row in self.rows() if row["error"] is None}

    def append(self, row: Row) -> None:
        """Adds a row; it is on disk when this returns."""
        path = self.path / "attempts.jsonl"
        with path.open("ab+", buffering=0) as file:
            # A kill may have torn the last line; it must not swallow this one.
            file.seek(0)
            data = file.read()
            file.truncate(data.rfind(b"\n") + 1)
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            os.fsync(file.fileno())

    def summary(self) -> Row:
        """summary.json. Raises CorpusError before the study has come to its end."""
        path = self.path / "summary.json"
        try:
            return json.loads(path.read_bytes())
        except (OSError, ValueError):
            raise CorpusError(
                f"{path} is not there or not whole", f"lumotree agent-study --resume {self.path}"
            ) from None

    def write_run(self) -> None:
        self.write("run.json", json.dumps(self.run, indent=2, ensure_ascii=False) + "\n")

    def write(self, name: str, text: str) -> None:
        """Replaces one file as a whole."""
        path = self.path / name
        draft = path.with_name(f".{path.name}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(text, encoding="utf-8", errors="surrogateescape", newline="\n")
            os.replace(draft, path)
        except OSError as error:
            raise CorpusError(f"{path} cannot be written: {error.strerror}") from None

    def place(self, kind: str, arm: str, name: str) -> str:
        """The name of an attempt's file below the study's folder."""
        return f"{kind}/{safe(arm)}/{name}"

    def write_predictions(self, arm: str) -> None:
        """ARM.preds.json from the diffs of the arm's finished attempts."""
        found = {}
        for row in self.rows():
            if row["arm"] == arm and row["error"] is None:
                path = self.path / self.place("attempts", arm, f"{row['task']}.diff")
                patch = path.read_bytes().decode("utf-8", errors="surrogateescape")
                found[row["task"]] = prediction(row["task"], f"lumotree-{arm}", patch)
        self.write(f"{safe(arm)}.preds.json", json.dumps(found, indent=2) + "\n")

    def recorded(self, arms: Iterable[str]) -> list[Row]:
        """The corpus lines of finished attempts; with several arms their names lead the ids."""
        arms = list(arms)
        lines = []
        for arm in arms:
            for row in self.rows():
                path = self.path / self.place("recorded", arm, f"{row['task']}.jsonl")
                if row["arm"] != arm or row["error"] is not None or not path.exists():
                    continue
                for text in path.read_bytes().split(b"\n")[:-1]:
                    line = json.loads(text)
                    if len(arms) > 1:
                        known = line["lumotree"]
                        line["custom_id"] = f"{arm}/{line['custom_id']}"
                        known["conversation"] = f"{arm}/{known['conversation']}"
                    lines.append(line)
        return lines

    def write_corpora(self, arms: Iterable[str]) -> None:
        """ARM.jsonl, the arm's requests as a corpus, for each arm that made some."""
        for arm in arms:
            if lines := self.recorded([arm]):
                about = {"recorded_from": f"agent study, arm {arm}"}
                write_corpus(lines, self.path / f"{safe(arm)}.jsonl", about, force=True)


def safe(name: str) -> str:
    """A name as a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)
