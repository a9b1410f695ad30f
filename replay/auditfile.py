"""audit.json of an audit folder, or of a replay folder that was audited.

schema_version   1
command, started_at, ended_at, machine, versions, git_commit
model            as in run.json; null where only the component audit ran
options          what was asked for
rule             equality, or envelope where the machine has no equal bits; null without model
audits[]         audit, seed, plan, passed, seconds, cpu_seconds (of this process), lines[] (name,
                 passed, total, figures: the worst of each, null when not finite; first_failure),
                 failures[] (check, place, reason)
faults[]         fault, audit, place, seed, acted, detected (steps from 0, null for never),
                 at_once, named: the audit that must see it, check, reason
undetected[]     sentences: faults that the audit they name did not see at once
walk_power[]     fault, seed, steps, seen, walks: in how many captured steps the G-test alone saw it
false_alarms     by audit: runs, failed
passed           no audit failed and no fault went undetected
ended_early      only where it did: the error that ended it; `passed` is then false
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lumotree.errors import LumoTreeError

SCHEMA_VERSION = 1
NAME = "audit.json"


def save_audit(folder: Path, found: dict[str, Any]) -> None:
    """Replaces the file as a whole. Raises LumoTreeError when it cannot be written."""
    target, draft = folder / NAME, folder / f".{NAME}.part"
    try:
        draft.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(draft, target)
    except OSError as error:
        raise LumoTreeError(f"{target} cannot be written: {error.strerror}") from None


def load_audit(path: Path) -> dict[str, Any]:
    """A saved audit.json. Raises LumoTreeError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LumoTreeError(f"{path} cannot be read: {error}") from None
    version = found.get("schema_version") if isinstance(found, dict) else None
    if version != SCHEMA_VERSION:
        raise LumoTreeError(
            f"{path} has schema version {version!r}; this version reads {SCHEMA_VERSION}",
            "use the version of lumotree that wrote it",
        )
    return found
