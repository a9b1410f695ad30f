"""summary.json: rates, decomposition, guards and comparisons, computed from a run's rows alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from replay.comparison import Side, compare_run, compare_sides
from replay.context import RunContext
from replay.decomposition import decompose
from replay.guards import Equality, judge
from replay.pooling import Pooled, pool
from replay.rows import Row
from replay.runmodel import run_model
from replay.statistics import aa_floor

SCHEMA_VERSION = 1
BASELINE = "ar"
# Figures that a failing guard takes away from an arm; they move to its `withheld`.
HEADLINES = ("pooled_tok_s", "run_range_tok_s", "mean_request_tok_s")


def summarise(
    arms: Mapping[str, Mapping[str, Any]],
    rows: Sequence[Row],
    equality: Equality | None,
    run: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The summary of a run. `arms` is run.json's status by arm name, in the order of the run.

    `run` is run.json: it says which requests belong to a conversation and what was sent.
    An arm with a failing guard has status `withheld`, the reason, and no headline figure. Only
    arms with status `ok` are ranked: `fastest` is the first of them, `runner_up` its paired
    comparison with the second.
    """
    context = RunContext.of(run or {})
    by_arm: dict[str, list[Row]] = {name: [] for name in arms}
    for row in rows:
        if row.arm in by_arm:
            by_arm[row.arm].append(row)
    pooled = {name: pool(own) for name, own in by_arm.items()}
    baseline = _baseline(pooled)
    guards = judge(
        rows,
        list(arms),
        baseline,
        equality=equality,
        prompts=context.prompts,
        greedy=context.greedy,
        equal_bits=context.equal_bits,
    )
    table, wanted = {}, _wanted(run or {})
    for name, status in arms.items():
        own = by_arm[name]
        entry = asdict(pooled[name])
        entry |= decompose(own, pooled[name], pooled[baseline] if baseline else None)
        entry["aa_floor"] = aa_floor(own)
        entry["status"], entry["reason"] = _status(status, entry, own, wanted)
        entry["guards"] = guards[name]
        _withhold(entry)
        table[name] = entry
    measured = {
        name: entry["reason"] if entry["status"] == "withheld" else None
        for name, entry in table.items()
        if pooled[name].pooled_tok_s
    }
    ranked = sorted(
        (name for name, e in table.items() if e["status"] == "ok" and e["pooled_tok_s"]),
        key=lambda name: -table[name]["pooled_tok_s"],
    )
    runner_up = None
    if len(ranked) > 1:
        sides = [Side(name, by_arm[name], context.conversations) for name in ranked[:2]]
        runner_up = compare_sides(*sides)
    return {
        "schema_version": SCHEMA_VERSION,
        **_label(run or {}),
        "arms": table,
        "baseline": baseline,
        "comparisons": compare_run(rows, measured, baseline, context.conversations)
        if baseline
        else [],
        "runner_up": runner_up,
        "cost_model": run_model(arms, table),
        "fastest": ranked[0] if ranked else None,
        "withheld": [name for name, entry in table.items() if entry["status"] == "withheld"],
    }


def _label(run: Mapping[str, Any]) -> dict[str, str]:
    """What must stand beside the figures of a model whose cost and acceptance are two models'."""
    label = (run.get("model") or {}).get("label")
    return {"label": label} if label else {}


def _baseline(pooled: Mapping[str, Pooled]) -> str | None:
    """`ar` where it was measured, else the first arm that was."""
    rated = [name for name, arm in pooled.items() if arm.pooled_tok_s]
    return BASELINE if BASELINE in rated else next(iter(rated), None)


def _withhold(entry: dict[str, Any]) -> None:
    """Takes the headline from an arm with a failing guard and says why."""
    if not entry["guards"].get("failed"):
        return
    reasons = [c["reason"] for c in entry["guards"]["checks"] if c["status"] == "fail"]
    if entry["status"] == "partial":
        reasons.append(entry["reason"])
    entry["status"], entry["reason"] = "withheld", "; ".join(reasons)
    entry["withheld"] = {key: entry[key] for key in HEADLINES}
    entry |= dict.fromkeys(HEADLINES)


def _wanted(run: Mapping[str, Any]) -> int | None:
    """Rows that a complete arm has: runs × selected requests; None in folders that do not say."""
    runs, selected = (run.get("options") or {}).get("runs"), run.get("selected")
    return runs * len(selected) if runs and selected is not None else None


def _status(
    status: Mapping[str, Any], entry: Mapping[str, Any], rows: Sequence[Row], wanted: int | None
) -> tuple[str, str | None]:
    """ok, partial (some rows are missing), failed (all failed) or unavailable, and the reason."""
    done, failed, reasons = entry["requests"], entry["failed_requests"], []
    if status["status"] != "ok":
        if not done:
            return status["status"], status.get("reason")
        reasons.append(f"{status['status']}: {status.get('reason') or 'no reason was saved'}")
    if failed:
        first = next(row.error for row in rows if row.error is not None and not row.warmup)
        reasons.append(f"{failed} of {failed + done} failed: {first}")
    if wanted is not None and done < wanted and (done or not failed):
        reasons.append(f"{done} of {wanted} requests completed")
    if not reasons:
        return "ok", None
    return ("partial" if done or not failed else "failed"), "; ".join(reasons)
