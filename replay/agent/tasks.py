"""An agent task: a workspace with a fault, its description, and the tests that judge a fix."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lumotree.errors import LumoTreeError


class Edit(BaseModel):
    """One change of one file: `old` stands in it exactly once and becomes `new`.

    `remove` deletes the file instead, as for a generated one that must be made anew.
    """

    model_config = ConfigDict(extra="forbid")
    file: str
    old: str = ""
    new: str = ""
    remove: bool = False

    @model_validator(mode="after")
    def _one_kind(self) -> Edit:
        if self.remove == bool(self.old):
            raise ValueError("an edit has either 'old', the text that is replaced, or 'remove'")
        return self

    def apply(self, root: Path) -> None:
        """Raises LumoTreeError when the text is not there exactly once."""
        path = root / self.file
        try:
            if self.remove:
                path.unlink()
                return
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise LumoTreeError(f"{self.file} cannot be edited: {error.strerror}") from None
        if text.count(self.old) != 1:
            raise LumoTreeError(
                f"{self.file} holds the text to edit {text.count(self.old)} times, not once"
            )
        path.write_text(text.replace(self.old, self.new), encoding="utf-8", newline="")

    @property
    def undone(self) -> Edit:
        """The edit that takes this one back; there is none for a removed file."""
        return Edit(file=self.file, old=self.new, new=self.old)


class Source(BaseModel):
    """Files from a published wheel, or from a commit of a local git mirror."""

    model_config = ConfigDict(extra="forbid")
    requirement: str | None = None
    sha256: list[str] = []
    wheel: str | None = None
    mirror: str | None = None
    commit: str | None = None
    patch: str | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Source:
        kinds = (self.requirement, self.wheel, self.mirror)
        if sum(kind is not None for kind in kinds) != 1:
            raise ValueError("a source has one of requirement, wheel and mirror")
        if self.requirement is not None and ("==" not in self.requirement or not self.sha256):
            raise ValueError("a requirement is pinned: NAME==VERSION, and sha256 of its wheels")
        if self.mirror is not None and not self.commit:
            raise ValueError("a mirror needs a commit")
        return self


class Task(BaseModel):
    """One task, as its JSON file has it. Paths of files are relative to the workspace's root."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    schema_version: Literal[1] = 1
    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    set: str = "own"
    environment: str | None = None
    workspace: Source
    tests_from: Source | None = None
    setup: list[Edit] = []
    fix: list[Edit] = []
    problem_statement: str = Field(min_length=1)
    test_files: list[str] = Field(min_length=1)
    fail_to_pass: list[str] = Field(default=[], alias="FAIL_TO_PASS")
    pass_to_pass: list[str] = Field(default=[], alias="PASS_TO_PASS")
    # The folder that relative names (environment, wheel, mirror) start from; set by the reader.
    folder: Path = Field(default=Path(), exclude=True)

    @property
    def hidden(self) -> Source:
        """Where the judging tests come from."""
        return self.tests_from or self.workspace

    @property
    def reference_fix(self) -> list[Edit]:
        """The edits that mend it: its own, or the set-up undone."""
        return self.fix or [edit.undone for edit in reversed(self.setup) if not edit.remove]

    def fix_command(self) -> str:
        """The reference fix as a shell command, as an agent would write it."""
        lines = ["from pathlib import Path", ""]
        for edit in self.reference_fix:
            if edit.remove:
                lines.append(f"Path({edit.file!r}).unlink()")
                continue
            lines += [
                f"path = Path({edit.file!r})",
                "text = path.read_text()",
                f"old = {_literal(edit.old)}",
                f"new = {_literal(edit.new)}",
                "assert text.count(old) == 1",
                "path.write_text(text.replace(old, new))",
            ]
        return "python - <<'EOF'\n" + "\n".join(lines) + "\nEOF"


def _literal(text: str) -> str:
    """A Python literal of several lines where that reads better than escapes."""
    if "\n" in text and '"""' not in text and "\\" not in text and not text.endswith('"'):
        return f'"""{text}"""'
    return repr(text)


def load_task(path: Path) -> Task:
    """Reads one task file. Raises LumoTreeError naming the file and the field."""
    try:
        task = Task.model_validate(json.loads(path.read_bytes()))
    except OSError as error:
        raise LumoTreeError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"]) or "task"
        raise LumoTreeError(f"{path}: {name}: {first['msg']}", "docs/agent-study.md") from None
    except ValueError as error:
        raise LumoTreeError(f"{path} is not JSON: {error}") from None
    return task.model_copy(update={"folder": path.resolve().parent})


def load_tasks(places: Sequence[Path], names: Sequence[str] = ()) -> list[Task]:
    """Tasks of files and folders (`*.json` in it, or in its `tasks`), by file name.

    `names` chooses: a task's id, or a set's name. A `.jsonl` file holds SWE-bench rows and is
    read by `replay.agent.swebench`. Raises LumoTreeError.
    """
    found: list[Task] = []
    for place in places:
        if place.is_dir():
            inner = place / "tasks"
            folder = inner if inner.is_dir() else place
            found += [load_task(path) for path in sorted(folder.glob("*.json"))]
        elif place.suffix == ".jsonl":
            from replay.agent.swebench import read_rows

            found += read_rows(place)
        else:
            found.append(load_task(place))
    if not found:
        raise LumoTreeError(f"no task in {', '.join(map(str, places)) or 'nothing'}")
    ids = [task.id for task in found]
    for task in found:
        if ids.count(task.id) > 1:
            raise LumoTreeError(f"there are two tasks '{task.id}'")
    chosen = []
    for name in names or ("all",):
        matched = [task for task in found if name in (task.id, task.set, "all")]
        if not matched:
            raise LumoTreeError(
                f"no task and no set is called '{name}'",
                f"sets: {', '.join(sorted({task.set for task in found}))}; tasks: {', '.join(ids)}",
            )
        chosen += [task for task in matched if task not in chosen]
    return chosen


def save_task(task: Task, path: Path) -> None:
    """Writes a task file; what is not set is left out."""
    value: dict[str, Any] = task.model_dump(
        mode="json", by_alias=True, exclude_none=True, exclude_defaults=True
    )
    text = json.dumps({"schema_version": 1, **value}, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
