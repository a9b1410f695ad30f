"""The tables of a study: the paper's shape with its figures beside, and what stands behind it."""

from __future__ import annotations

from typing import Any

from replay.agent.summary import OUTCOMES
from replay.export import markdown_table
from replay.report.cells import Cell, Table, count, number, words

# The paper's study: ten tasks, one attempt each, a 27B model on one GPU.
# Arm: resolved of ten, requests, tok/s, minutes, output tokens.
PAPER = {
    "lumotree": (5, 248, 26.12, 190.8, 258_889),
    "mtp-5": (6, 224, 27.17, 99.5, 134_643),
    "sglang-eagle": (5, 210, 29.89, 103.0, 158_827),
}
PAPER_TASKS = 10
BESIDE = (
    "Rows of the paper are of ten release tasks with a 27B model on one GPU; they stand here for "
    "their shape, not to be compared with another model or machine."
)
KINDS = {"R": "good", "F": "bad", "E": "soft", "X": "warn"}


def tables(summary: dict[str, Any]) -> dict[str, Table]:
    """Every table of a study, by name; those of tokens only where an arm decodes with a model."""
    makers = (_main, _outcomes, _reasons, _minutes, _tokens, _requests)
    found = [maker(summary) for maker in makers]
    return {table.name: table for table in found if table.rows}


def markdown(summary: dict[str, Any]) -> str:
    """study.md: the tables, the caution, and what was not counted."""
    parts = ["# Agent study"]
    for table in tables(summary).values():
        parts += [f"## {table.title}", markdown_table(table), table.note or ""]
    parts.append(summary["caution"])
    if not summary["contained"]:
        parts.append("Commands were not contained in a sandbox.")
    if left_out := not_counted(summary):
        parts += ["## Not counted", "\n".join(f"- {text}" for text in left_out)]
    return "\n\n".join(part for part in parts if part) + "\n"


def not_counted(summary: dict[str, Any]) -> list[str]:
    """Sentences on what is in no rate, and on arms that did not run."""
    arms = summary["arms"].items()
    found = [f"{name}: {text}" for name, arm in arms for text in arm["warnings"]]
    return found + [f"{name}: unavailable: {arm['reason']}" for name, arm in arms if arm["reason"]]


def _main(summary: dict[str, Any]) -> Table:
    columns = [("arm", ""), ("resolved", ""), ("requests", ""), ("rate", "tok/s")]
    columns += [("time", "minutes"), ("output tokens", "")]
    rows, beside = [], False
    for name, arm in summary["arms"].items():
        rows.append(
            [
                words(name, "name"),
                Cell(f"{arm['resolved']} of {arm['tasks']}", arm["resolved"], "num"),
                count(arm["requests"]),
                number(arm["tok_s"]),
                number(arm["minutes"]["total"], 1),
                count(arm["output_tokens"] if arm["decodes"] else None),
            ]
        )
        if paper := PAPER.get(name.partition(":")[0]):
            beside = True
            resolved, requests, rate, minutes, tokens = paper
            shown = [f"{resolved} of {PAPER_TASKS}", f"{requests}", f"{rate:.2f}"]
            shown += [f"{minutes:.1f}", f"{tokens:,}"]
            cells = [Cell(text, kind="num soft") for text in shown]
            rows.append([words(f"{name} (paper)", "name soft"), *cells])
    note = (
        "The rate is (generated tokens - requests) / (seconds of requests - seconds to first "
        "tokens), from the server's counters before and after tasks. Time is the agents', without "
        "grading and without the start of servers."
    )
    return Table("main", "Tasks", columns, rows, f"{note} {BESIDE}" if beside else note)


def _outcomes(summary: dict[str, Any]) -> Table:
    arms = summary["arms"].values()
    seen = {cell["outcome"] for arm in arms for cell in arm["cells"].values()}
    rows = [
        [words(task, "name"), *(_outcome(arm["cells"].get(task)) for arm in arms)]
        for task in summary["tasks"]
    ]
    note = " ".join(f"{key}: {text}." for key, text in OUTCOMES.items() if key in seen)
    return Table("outcomes", "Outcomes", _per_arm("task", summary["arms"]), rows, note)


def _outcome(cell: dict[str, Any] | None) -> Cell:
    if cell is None:
        return words(None, "soft")
    return Cell(cell["outcome"], kind=KINDS[cell["outcome"]], title=cell["reason"])


def _reasons(summary: dict[str, Any]) -> Table:
    rows = [
        [
            words(task, "name"),
            words(name),
            words(cell["reason"]),
            words(cell["exit_status"], "soft"),
        ]
        for task in summary["tasks"]
        for name, arm in summary["arms"].items()
        if (cell := arm["cells"].get(task)) is not None and cell["reason"]
    ]
    columns = [("task", ""), ("arm", ""), ("why it is not resolved", ""), ("the agent's end", "")]
    return Table("reasons", "Why tasks are not resolved", columns, rows)


def _minutes(summary: dict[str, Any]) -> Table:
    parts = ("model", "tools", "grading")
    rows = []
    for name, arm in summary["arms"].items():
        spent = [arm["minutes"][part] for part in parts]
        whole = sum(value or 0.0 for value in spent) or 1.0
        bars = [number(v, bar=None if v is None else v / whole) for v in spent]
        rows.append([words(name, "name"), *bars])
    columns = [("arm", ""), *((part, "minutes") for part in parts)]
    return Table("minutes", "Minutes", columns, rows)


def _tokens(summary: dict[str, Any]) -> Table:
    arms = {name: arm for name, arm in summary["arms"].items() if arm["decodes"]}
    rows = _per_task(summary, arms, "completion_tokens") if arms else []
    return Table("tokens", "Output tokens by task", _per_arm("task", arms), rows)


def _requests(summary: dict[str, Any]) -> Table:
    arms = summary["arms"]
    rows = _per_task(summary, arms, "requests")
    return Table("requests", "Requests by task", _per_arm("task", arms), rows)


def _per_task(summary: dict[str, Any], arms: dict[str, Any], key: str) -> list[list[Cell]]:
    return [
        [words(t, "name"), *(count(arm["cells"].get(t, {}).get(key)) for arm in arms.values())]
        for t in summary["tasks"]
    ]


def _per_arm(first: str, arms: dict[str, Any]) -> list[tuple[str, str]]:
    return [(first, ""), *((name, "") for name in arms)]
