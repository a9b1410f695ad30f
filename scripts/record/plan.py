"""What is recorded: the pinned revision, the files the tasks see, and each corpus's selection."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from replay.agent.script import Script, read_script

REPOSITORY = Path(__file__).resolve().parents[2]
TASKS = Path(__file__).parent / "tasks"

# A commit of this repository. Tasks quote its text, so moving it means re-reading every task.
REVISION = "b4d065689791fe89381998acb3fafecbefad8ae7"
# The packages and their tests: neither the checkpoint, the corpora nor the tasks themselves.
PATHS = (
    ".gitignore",
    "arms",
    "lumotree",
    "replay",
    "scripts/agent_format.py",
    "tests/arms",
    "tests/replay",
    "pyproject.toml",
    ":(exclude)lumotree/embedded",
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
