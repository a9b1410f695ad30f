"""An audit for a terminal: its lines, and faults against the audits that saw them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from replay.tables import plain_table

UNITS = {"component": "set", "continuation": "cycle", "sampler": "step", "soak": "request"}


def print_audit(out: Console, found: dict[str, Any]) -> None:
    """What `lumotree audit` prints."""
    if found["audits"]:
        out.print(line_table(found))
        out.print()
    if found["faults"]:
        out.print(fault_table(found["faults"]))
    for text in walk_power(found):
        out.print(text)
    for entry in found["audits"]:
        for failure in entry["failures"][:5]:
            out.print(
                f"{entry['audit']}, seed {entry['seed']}: {failure['check']}, "
                f"{failure['place']}: {failure['reason']}",
                markup=False,
            )
    if found["options"]["seeds"] > 1:
        for audit, row in found["false_alarms"].items():
            out.print(f"{audit}: {row['failed']} of {row['runs']} runs without a fault failed")
    out.print(verdict(found))


def walk_power(found: dict[str, Any]) -> list[str]:
    """A sentence per fault on what walks alone see of it."""
    return [
        f"{entry['fault']}: {entry['walks']:,} walks alone see it in {entry['seen']} of "
        f"{entry['steps']} captured steps"
        for entry in found["walk_power"]
    ]


def verdict(found: dict[str, Any]) -> str:
    """The whole audit in a sentence."""
    if "ended_early" in found:
        return f"Ended early, and says nothing of what was left: {found['ended_early']}."
    bad = [f"{e['audit']} (seed {e['seed']})" for e in found["audits"] if not e["passed"]]
    if bad:
        return f"Failed: {', '.join(bad)}."
    rule = {
        "equality": "Every comparison is of bits.",
        "envelope": "This machine has no equal bits: distances are within twice the envelope.",
    }.get(found["rule"], "")
    planted = len({entry["fault"] for entry in found["faults"]})
    if found["undetected"]:
        return f"Failed: {len(found['undetected'])} times a planted fault went undetected."
    parts = ["All audits passed.", rule] if found["audits"] else []
    if planted:
        parts.append(f"All {planted} planted faults were seen in the step they acted in.")
    return " ".join(part for part in parts if part)


def line_table(found: dict[str, Any]) -> Table:
    """One row per kind of check, seeds together."""
    table = plain_table("Audits")
    for name in ("audit", "check"):
        table.add_column(name, overflow="fold")
    table.add_column("passed", justify="right", no_wrap=True)
    table.add_column("worst figures", overflow="fold")
    for audit, line in merged_lines(found):
        figures = ", ".join(f"{k} {figure(v)}" for k, v in line["figures"].items())
        style = None if line["passed"] == line["total"] else "bold red"
        table.add_row(
            audit, line["name"], f"{line['passed']}/{line['total']}", figures, style=style
        )
    return table


def merged_lines(found: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(audit, line) with the counts of all seeds added and the worst of their figures."""
    table: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in found["audits"]:
        for line in entry["lines"]:
            row = table.setdefault(
                (entry["audit"], line["name"]),
                {"name": line["name"], "passed": 0, "total": 0, "figures": {}},
            )
            row["passed"] += line["passed"]
            row["total"] += line["total"]
            for key, value in line["figures"].items():
                known = row["figures"].get(key, value)
                row["figures"][key] = None if None in (known, value) else max(known, value)
    return [(audit, row) for (audit, _), row in table.items()]


def fault_table(faults: Sequence[dict[str, Any]]) -> Table:
    """Faults down, audits across: how often seen at once, and where first."""
    table = plain_table("Planted faults")
    audits = list(dict.fromkeys(entry["audit"] for entry in faults))
    for name in ("fault", "must be seen by", *audits):
        table.add_column(name, overflow="fold")
    for name, named, cells in fault_rows(faults, audits):
        table.add_row(name, named, *cells)
    return table


def fault_rows(
    faults: Sequence[dict[str, Any]], audits: Sequence[str]
) -> list[tuple[str, str, list[str]]]:
    """(fault, the audit it names, a cell per audit)."""
    names = {entry["fault"]: entry["named"] for entry in faults}
    return [
        (
            name,
            named,
            [
                _cell([e for e in faults if (e["fault"], e["audit"]) == (name, audit)], audit)
                for audit in audits
            ],
        )
        for name, named in names.items()
    ]


def _cell(entries: list[dict[str, Any]], audit: str) -> str:
    """Empty where the fault was not planted, '-' where the audit does not run what it breaks."""
    if not entries:
        return ""
    acted = [entry for entry in entries if entry["acted"] is not None]
    if not acted:
        return "-"
    seen = [entry for entry in acted if entry["detected"] is not None]
    if not seen:
        return f"0/{len(acted)}"
    first = min(entry["detected"] for entry in seen)
    at_once = sum(entry["at_once"] for entry in seen)
    late = "" if at_once == len(seen) else f", {len(seen) - at_once} late"
    return f"{len(seen)}/{len(acted)}, {UNITS[audit]} {first + 1}{late}"


def figure(value: float | None) -> str:
    """Counts as counts, measurements with three digits; None is a value that was not finite."""
    if value is None:
        return "not finite"
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e6 else f"{value:.2e}"
