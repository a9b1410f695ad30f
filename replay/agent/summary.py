"""summary.json of a study: what each arm did, from saved rows only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb
from typing import Any

from replay.agent.counters import Difference, total

SCHEMA_VERSION = 1
OUTCOMES = {
    "R": "resolved: every test passes",
    "F": "a test fails",
    "E": "no change outside the tests",
    "X": "the server failed; no attempt of the agent, and run again by --resume",
}
ONE_ATTEMPT = (
    "One attempt per task and arm shows that an arm can carry an agent through whole tasks, and "
    "what that took in time and tokens. It does not show which arm solves more: over {n} "
    "two arms that both resolve every second task differ by {gap} or more resolved tasks in "
    "{share:.0%} of studies, because sampling alone changes what an agent does."
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
        n=f"{tasks} task{'s' if tasks > 1 else ''}", gap=gap, share=_apart(tasks, gap)
    )


def _apart(tasks: int, gap: int) -> float:
    """P(|A - B| >= gap) for two equal arms that resolve each task with probability 1/2."""
    ways = [comb(tasks, k) / 2**tasks for k in range(tasks + 1)]
    return sum(
        ways[a] * ways[b] for a in range(tasks + 1) for b in range(tasks + 1) if abs(a - b) >= gap
    )
