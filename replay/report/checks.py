"""Guards as tables: what was checked on each arm's output, and what came of it."""

from __future__ import annotations

from replay.report.cells import NONE, Cell, Table, words
from replay.report.view import RunView


def guard_table(view: RunView) -> Table | None:
    """Guards down, arms across; what a guard saw stands in the table of findings."""
    arms = [arm for arm in view.arms.values() if arm.checks]
    names = list(dict.fromkeys(check["name"] for arm in arms for check in arm.checks))
    if not names:
        return None
    looks = {"pass": "good", "fail": "bad", "warn": "warn", "skip": "soft"}
    rows = []
    for name in names:
        cells = [words(name.replace("_", " "), "name")]
        for arm in arms:
            found = next((check for check in arm.checks if check["name"] == name), None)
            status = found["status"] if found else NONE
            reason = found["reason"] if found else None
            cells.append(Cell(status, kind=looks.get(status, "soft"), title=reason))
        rows.append(cells)
    columns = [("guard", ""), *((arm.name, "") for arm in arms)]
    note = "A failed guard withholds the arm's rate. A guard is skipped where the arm cannot say."
    return Table("guards", "Output guards", columns, rows, note)


def finding_table(view: RunView) -> Table | None:
    """The sentences of guards that failed or warned; one row for arms that share a sentence."""
    shared: dict[tuple[str, str, str], list[str]] = {}
    for arm in view.arms.values():
        for check in arm.checks:
            if check["status"] in ("fail", "warn"):
                key = (check["name"], check["status"], str(check["reason"]))
                shared.setdefault(key, []).append(arm.name)
    if not shared:
        return None
    rows = [
        [
            words(", ".join(names), "name"),
            words(name.replace("_", " ")),
            words(status, "bad" if status == "fail" else "warn"),
            words(reason),
        ]
        for (name, status, reason), names in sorted(shared.items(), key=lambda item: item[0][1])
    ]
    columns = [("arm", ""), ("guard", ""), ("result", ""), ("what was seen", "")]
    return Table("findings", "Findings", columns, rows)
