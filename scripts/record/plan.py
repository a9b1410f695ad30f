"""What is recorded: the pinned revision, the files the tasks see, and each corpus's selection."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scripts.record.script import Script, read_script

REPOSITORY = Path(__file__).resolve().parents[2]
TASKS = Path(__file__).parent / "tasks"

# A commit of this repository. Tasks quote its text, so moving it means re-reading every task.
REVISION = "HEAD"
# Text only: neither the checkpoint nor the corpora belong in a task's workspace.
PATHS = (
    ".",
    ":(exclude)corpora",
    ":(exclude)results",
    ":(exclude)lumotree/embedded",
    ":(exclude)scripts/record",
    ":(exclude)tests/record",
)


@dataclass(frozen=True)
class Plan:
    """One corpus: its name, and how many of its captured requests it keeps."""

    name: str
    requests: int = 43

    @property
    def path(self) -> Path:
        return REPOSITORY / "corpora" / f"{self.name}.jsonl"

    @property
    def manifest_path(self) -> Path:
        return REPOSITORY / "corpora" / f"{self.name}.manifest.json"

    def scripts(self) -> list[Script]:
        """The tasks in the order in which they are recorded: by file name."""
        return [read_script(path) for path in sorted((TASKS / self.name).glob("*.md"))]


PLANS = (Plan("first"), Plan("disjoint"))
