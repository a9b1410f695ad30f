"""An audit as tables of a report: its own page, or a section beside a replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from replay.audittables import fault_rows, figure, merged_lines, verdict
from replay.report.cells import Cell, Table, count, words
from replay.report.template import render_page, write_page

NAME = "audit.html"


def audit_tables(found: dict[str, Any]) -> list[Table]:
    """Checks, planted faults and false alarms; tables without rows are left out."""
    tables = [_checks(found), _faults(found), _power(found), _alarms(found)]
    return [table for table in tables if table.rows]


def _checks(found: dict[str, Any]) -> Table:
    rows = []
    asides = {}
    reasons = {
        (entry["audit"], line["name"]): line["first_failure"]
        for entry in reversed(found["audits"])
        for line in entry["lines"]
        if line["first_failure"]
    }
    for audit, line in merged_lines(found):
        right = line["passed"] == line["total"]
        if not right:
            asides[len(rows)] = str(reasons.get((audit, line["name"])))
        figures = ", ".join(f"{key} {figure(value)}" for key, value in line["figures"].items())
        share = line["passed"] / line["total"]
        rows.append(
            [
                words(audit, "name"),
                words(line["name"]),
                Cell(
                    f"{line['passed']}/{line['total']}", share, "num good" if right else "num bad"
                ),
                words(figures, "soft"),
            ]
        )
    columns = [("audit", ""), ("check", ""), ("passed", ""), ("worst figures", "")]
    return Table("audit", "Audits", columns, rows, verdict(found), asides)


def _faults(found: dict[str, Any]) -> Table:
    audits = list(dict.fromkeys(entry["audit"] for entry in found["faults"]))
    rows = [
        [
            words(name, "name"),
            words(named),
            *(
                words(cell, "" if audit == named else "soft")
                for audit, cell in zip(audits, cells, strict=True)
            ),
        ]
        for name, named, cells in fault_rows(found["faults"], audits)
    ]
    columns = [("fault", ""), ("must be seen", "by"), *((audit, "") for audit in audits)]
    note = (
        "Times seen of times planted, and the first step that showed it. A dash: the audit does "
        "not run the code that the fault breaks. Late: not in the step in which the fault acted."
    )
    return Table("faults", "Planted faults", columns, rows, note)


def _power(found: dict[str, Any]) -> Table:
    rows = [
        [words(e["fault"], "name"), words(str(e["seed"])),
         Cell(f"{e['seen']}/{e['steps']}", e["seen"], "num"), count(e["walks"])]
        for e in found["walk_power"]
    ]  # fmt: skip
    columns = [("fault", ""), ("seed", ""), ("seen", "captured steps"), ("walks", "per step")]
    note = "The exact checks of rows and draws are left out here: this is the G-test alone."
    return Table("power", "What walks alone see", columns, rows, note)


def _alarms(found: dict[str, Any]) -> Table:
    rows = []
    if found["options"]["seeds"] > 1:
        rows = [
            [words(audit, "name"), Cell(str(r["runs"]), r["runs"], "num"),
             Cell(str(r["failed"]), r["failed"], "num bad" if r["failed"] else "num good")]
            for audit, r in found["false_alarms"].items()
        ]  # fmt: skip
    columns = [("audit", ""), ("runs", "without a fault"), ("failed", "")]
    return Table("alarms", "False alarms", columns, rows)


def write_audit_report(folder: Path, found: dict[str, Any]) -> Path:
    """Writes audit.html beside audit.json. Raises CorpusError when it cannot be written."""
    page = render_page(
        "audit.html.j2",
        tables=audit_tables(found),
        verdict=verdict(found),
        where=_where(found),
        facts=_facts(found),
    )
    return write_page(folder / NAME, page)


def _where(found: dict[str, Any]) -> str:
    machine, model = found["machine"], found["model"] or {}
    device = machine.get("gpu") or f"{machine.get('cpu')}, {machine.get('cores')} cores"
    named = Path(str(model["name"])).name if model else "no model"
    kind = f", {model['dtype']}" if model else ""
    return f"model {named}{kind} · {device} · {found['started_at'][:10]}"


def _facts(found: dict[str, Any]) -> list[tuple[str, str]]:
    options = found["options"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return [
        ("command", " ".join(found["command"])),
        ("seeds", f"{options['seed']} to {options['seed'] + options['seeds'] - 1}"),
        ("rule", str(found["rule"] or "equality of exact verifiers")),
        ("versions", versions),
        ("commit", str(found["git_commit"])),
        *((f"{e['audit']}, seed {e['seed']}", f"{e['seconds']:.0f} s") for e in found["audits"]),
    ]
