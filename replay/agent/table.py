"""The study's table in the paper's shape, and what stands behind it. Reads saved rows only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from replay.agent.counters import Difference, total

SCHEMA_VERSION = 1
# The paper's study: ten tasks, one attempt each, a 27B model on one GPU.
# Arm: resolved of ten, requests, tok/s, minutes, output tokens.
PAPER = {
    "lumotree": (5, 248, 26.12, 190.8, 258_889),
    "mtp-5": (6, 224, 27.17, 99.5, 134_643),
    "sglang-eagle": (5, 210, 29.89, 103.0, 158_827),
}
PAPER_TASKS = 10
OUTCOMES = {
    "R": "resolved: every test passes",
    "F": "a test fails",
    "E": "no change outside the tests",
    "X": "the server failed; no attempt of the agent, and run again by --resume",
}
ONE_ATTEMPT = (
    "One attempt per task and arm shows that an arm can carry an agent through whole tasks, and "
    "what that took in time and tokens. It does not show which arm solves more: over {n} "
    "two arms that both resolve every second task differ by {gap} or more resolved tasks about "
    "one time in {chance}, because sampling alone changes what an agent does."
)


def summarise(run: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """summary.json of a study: one entry per arm, one cell per arm and task."""
    tasks = list(run["tasks"])
    arms = {}
    for name, known in run["arms"].items():
        own = [row for row in rows if row["arm"] == name]
        arms[name] = _arm(own, known, len(tasks))
    return {
        "schema_version": SCHEMA_VERSION,
        "tasks": tasks,
        "sets": run["sets"],
        "arms": arms,
        "budget": run["options"]["budget"],
        "sandbox": run["sandbox"],
        "contained": run["contained"],
        "caution": caution(len(tasks)),
    }


def _arm(rows: list[dict[str, Any]], known: dict[str, Any], tasks: int) -> dict[str, Any]:
    counted = [row for row in rows if row["error"] is None]
    outcomes = Counter(row["outcome"] for row in rows)
    parts = [(row["task"], row["counters"]) for row in counted if row["counters"]]
    parts += [("all", segment) for segment in known.get("segments", [])]
    good = [part for _, part in parts if not part["faults"]]
    pooled = total([Difference(**part["difference"]) for part in good])
    rate = pooled.tok_s if pooled is not None and known.get("decodes") else None
    warnings = [f"{task}: {fault}" for task, part in parts for fault in part["faults"]]

    def add(key: str, scale: float = 1.0) -> float | None:
        values = [row[key] for row in counted]
        return None if not values or None in values else sum(values) / scale

    return {
        "status": "unavailable" if known.get("unavailable") else "ran",
        "reason": known.get("unavailable"),
        "tasks": tasks,
        "attempts": len(counted),
        "resolved": outcomes["R"],
        "outcomes": {key: outcomes[key] for key in OUTCOMES},
        "requests": add("requests"),
        "tok_s": rate,
        "tok_s_tasks": len(good),
        "minutes": {
            "total": add("agent_s", 60.0),
            "model": add("model_s", 60.0),
            "tools": add("tools_s", 60.0),
            "grading": add("grading_s", 60.0),
        },
        "output_tokens": add("completion_tokens"),
        "decodes": bool(known.get("decodes")),
        "warnings": warnings,
        "cells": {
            row["task"]: {
                key: row[key]
                for key in ("outcome", "reason", "exit_status", "requests", "completion_tokens")
            }
            for row in rows
        },
    }


def caution(tasks: int) -> str:
    """What one attempt per task can and cannot show, with the figure for this many tasks."""
    gap = max(1, round(tasks**0.5 / 1.5))
    return ONE_ATTEMPT.format(
        n=f"{tasks} task{'s' if tasks > 1 else ''}", gap=gap, chance=_one_in(tasks, gap)
    )


def _one_in(tasks: int, gap: int) -> int:
    """1 / P(|A - B| >= gap) for two equal arms that resolve each task with probability 1/2."""
    from math import comb

    ways = [comb(tasks, k) / 2**tasks for k in range(tasks + 1)]
    apart = sum(
        ways[a] * ways[b] for a in range(tasks + 1) for b in range(tasks + 1) if abs(a - b) >= gap
    )
    return max(1, round(1 / apart))


def markdown(summary: dict[str, Any]) -> str:
    """study.md: the table, the grid, minutes and tokens."""
    arms = summary["arms"]
    lines = ["# Agent study", "", *_main(arms), ""]
    if any(name.partition(":")[0] in PAPER for name in arms):
        lines += [
            "The paper's figures are of ten release tasks with a 27B model on one GPU; they stand "
            "here for their shape, not to be compared with another model or machine.",
            "",
        ]
    lines += ["## Outcomes", "", *_grid(summary), ""]
    lines += [f"{key}: {words}." for key, words in OUTCOMES.items() if _any(arms, key)]
    lines += ["", "## Minutes", "", *_minutes(arms), ""]
    lines += ["## Output tokens by task", "", *_tokens(summary), "", summary["caution"], ""]
    if not summary["contained"]:
        lines += ["Commands were not contained in a sandbox.", ""]
    warned = [f"- {name}: {text}" for name, arm in arms.items() for text in arm["warnings"]]
    warned += [
        f"- {name}: unavailable: {arm['reason']}" for name, arm in arms.items() if arm["reason"]
    ]
    if warned:
        lines += ["## Not counted", "", *warned, ""]
    return "\n".join(lines)


def _main(arms: dict[str, Any]) -> list[str]:
    rows = []
    for name, arm in arms.items():
        rows.append(
            [
                name,
                f"{arm['resolved']} of {arm['tasks']}",
                _count(arm["requests"]),
                _number(arm["tok_s"], 2),
                _number(arm["minutes"]["total"], 1),
                _count(arm["output_tokens"]) if arm["decodes"] else "-",
            ]
        )
        paper = PAPER.get(name.partition(":")[0])
        if paper:
            resolved, requests, rate, minutes, tokens = paper
            shown = [f"{resolved} of {PAPER_TASKS}", f"{requests}", f"{rate:.2f}"]
            rows.append([f"{name} (paper)", *shown, f"{minutes:.1f}", f"{tokens:,}"])
    return _table(["Arm", "Resolved", "Requests", "tok/s", "Minutes", "Output tokens"], rows)


def _grid(summary: dict[str, Any]) -> list[str]:
    arms = summary["arms"]
    rows = [
        [task, *(arm["cells"].get(task, {}).get("outcome", "-") for arm in arms.values())]
        for task in summary["tasks"]
    ]
    return _table(["Task", *arms], rows)


def _minutes(arms: dict[str, Any]) -> list[str]:
    rows = [
        [name, *(_number(arm["minutes"][key], 2) for key in ("model", "tools", "grading"))]
        for name, arm in arms.items()
    ]
    return _table(["Arm", "Model", "Tools", "Grading"], rows)


def _tokens(summary: dict[str, Any]) -> list[str]:
    arms = {name: arm for name, arm in summary["arms"].items() if arm["decodes"]}
    if not arms:
        return ["No arm of this study decodes with a model."]
    rows = [
        [
            task,
            *(_count(arm["cells"].get(task, {}).get("completion_tokens")) for arm in arms.values()),
        ]
        for task in summary["tasks"]
    ]
    return _table(["Task", *arms], rows)


def _any(arms: dict[str, Any], outcome: str) -> bool:
    return any(arm["outcomes"][outcome] for arm in arms.values())


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
