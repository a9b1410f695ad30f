"""SWE-bench rows as tasks, with a local git mirror in place of a container image.

A row says what to check out and which tests judge; it does not say how to install. `mirror` names
a local clone (a folder, relative to the file), `environment` an environment file; both may stand
in each row, or in a `NAME.jsonl` file's sibling `NAME.defaults.json`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lumotree.errors import LumoTreeError
from replay.agent.tasks import Source, Task

NEEDED = ("instance_id", "base_commit", "problem_statement", "test_patch", "FAIL_TO_PASS")


def read_rows(path: Path) -> list[Task]:
    """Raises LumoTreeError naming the line and what it lacks."""
    defaults_path = path.with_suffix(".defaults.json")
    try:
        lines = path.read_bytes().split(b"\n")
        defaults = json.loads(defaults_path.read_bytes()) if defaults_path.exists() else {}
    except (OSError, ValueError) as error:
        raise LumoTreeError(f"{path} cannot be read: {error}") from None
    tasks = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path} line {number}"
            try:
                row = {**defaults, **json.loads(line)}
            except (ValueError, TypeError):
                raise LumoTreeError(f"{where} is not a JSON object") from None
            tasks.append(_task(row, where, path.resolve().parent))
    return tasks


def _task(row: dict[str, Any], where: str, folder: Path) -> Task:
    if missing := [name for name in NEEDED if not row.get(name)]:
        raise LumoTreeError(f"{where} is no SWE-bench row: it has no {', '.join(missing)}")
    if not row.get("mirror"):
        raise LumoTreeError(
            f"{where} names no mirror", "add mirror=FOLDER, a local clone of the repository"
        )
    at = {"mirror": row["mirror"], "commit": row["base_commit"]}
    try:
        task = Task(
            id=row["instance_id"],
            set=row.get("set", "swe-bench"),
            environment=row.get("environment"),
            workspace=Source(**at),
            tests_from=Source(**at, patch=row["test_patch"]),
            problem_statement=row["problem_statement"],
            test_files=patched_files(row["test_patch"]),
            FAIL_TO_PASS=_names(row["FAIL_TO_PASS"]),
            PASS_TO_PASS=_names(row.get("PASS_TO_PASS") or []),
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise LumoTreeError(f"{where}: {first['loc'][-1]}: {first['msg']}") from None
    return task.model_copy(update={"folder": folder})


def patched_files(patch: str) -> list[str]:
    """The files that a unified diff leaves behind, in its order."""
    found = re.findall(r"^\+\+\+ b/(.+?)\t?$", patch, flags=re.MULTILINE)
    return list(dict.fromkeys(found))


def _names(value: Any) -> list[str]:
    """Published rows hold the list as JSON text."""
    return json.loads(value) if isinstance(value, str) else list(value)
