"""The tables of a report: rates, comparisons, what a rate is made of, phases."""

from __future__ import annotations

from lumotree.request import PHASES
from replay.report.arm import ArmView
from replay.report.cells import NONE, Cell, Table, count, number, words
from replay.report.checks import finding_table, guard_table
from replay.report.predictions import cost_table
from replay.report.view import RunView
from replay.report.words import floor_of, interval_of, verdict_of


def headline_table(view: RunView) -> Table:
    """One row per arm, unavailable ones too, with what its rate is made of and its status."""
    entries = {entry["arm"]: entry for entry in reversed(view.comparisons)}
    base = view.baseline
    best = view.winner
    top = max((arm.rate or 0 for arm in view.measured), default=0) or 1
    columns = [("arm", ""), ("rate", "tok/s"), ("run range", "tok/s")]
    columns += [(f"× {base.name if base else 'baseline'}", ""), ("tokens", "per step")]
    columns += [("time", "ms per step"), ("mean request", "tok/s"), ("requests", "")]
    columns += [("tokens", "in all"), ("status", "")]
    rows = []
    for arm in view.arms.values():
        rate = number(arm.quoted, 2, "best" if arm is best else "", bar=_share(arm.quoted, top))
        if arm.withheld:
            rate = Cell("withheld", None, "num bad")
        ratio = entries[arm.name].get("ratio") if arm.name in entries else None
        spread = arm.entry.get("run_range_tok_s")
        rows.append(
            [
                words(arm.name, "name"),
                rate,
                Cell(f"{spread[0]:.1f} – {spread[1]:.1f}", spread[0], "num")
                if spread and not arm.withheld
                else Cell(NONE, kind="num soft"),
                number(None if arm.withheld else ratio),
                number(arm.number("tokens_per_step")),
                number(arm.number("ms_per_step"), 1),
                number(None if arm.withheld else arm.number("mean_request_tok_s"), 1),
                count(arm.number("requests") or None),
                count(arm.number("completion_tokens") or None),
                _status(arm),
            ]
        )
    asides = {}
    for index, arm in enumerate(view.arms.values()):
        reason = arm.withheld or arm.entry.get("reason")
        if reason:
            asides[index] = str(reason)
    return Table("headline", "Pooled decode rate", columns, rows, asides=asides)


def comparison_table(view: RunView) -> Table | None:
    """Paired ratios with intervals, wins and losses, and the A/A floor beside each."""
    if not view.comparisons:
        return None
    columns = [
        ("arm", ""),
        ("against", ""),
        ("ratio", "of pooled rates"),
        ("95 % interval", ""),
        ("interval", "from"),
        ("ratio", "mean request"),
    ]
    columns += [("won – lost – tied", "requests"), ("A/A floor", "same arm twice"), ("verdict", "")]
    rows: list[list[Cell]] = []
    asides: dict[int, str] = {}
    for entry in view.comparisons:
        low, high, floor = entry.get("ci_low"), entry.get("ci_high"), floor_of(entry)
        wins, losses = entry.get("wins"), entry.get("losses")
        verdict = verdict_of(view, entry)
        kind = {"faster": "good", "slower": "bad"}.get(verdict, "")
        reason, ties = entry.get("reason"), entry.get("ties")
        rows.append(
            [
                words(entry["arm"], "name"),
                words(entry["baseline"], "name"),
                number(entry.get("ratio"), 3),
                _range(low, high),
                words(interval_of(entry), "soft"),
                number(entry.get("request_ratio"), 3),
                Cell(NONE, kind="num soft")
                if wins is None
                else Cell(f"{wins} – {losses}" + (f" – {ties}" if ties else ""), wins, "num"),
                _range(*(floor or (None, None))),
                words(verdict, kind),
            ]
        )
        if reason and not kind:
            asides[len(rows) - 1] = str(reason)
    note = (
        "Ratios are of rates over the requests that both arms completed; the mean request weighs "
        "each request equally. The interval is Student's t below 12 conversations and a "
        "studentised bootstrap (bootstrap-t) from 12 on. The A/A floor is how far two runs of one "
        "arm come apart. A verdict needs 6 conversations, an interval that excludes 1 and an "
        "effect beyond the floor."
    )
    return Table("comparisons", "Paired comparisons", columns, rows, note, asides)


def decomposition_table(view: RunView) -> Table | None:
    """A rate is tokens per step over milliseconds per step; each beside the baseline's."""
    base = view.baseline
    if base is None:
        return None
    base_ms, base_tokens = base.number("ms_per_step"), base.number("tokens_per_step")
    if not base_ms or not base_tokens:
        return None
    times = f"× {base.name}"
    columns = [("arm", ""), ("tokens", "per step"), ("tokens", times), ("time", "ms per step")]
    columns += [("time", times), ("rate", times)]
    columns += [("break-even", "tokens per step"), ("spare", "tokens per step")]
    rows = []
    for arm in view.measured:
        tokens, ms = arm.number("tokens_per_step"), arm.number("ms_per_step")
        if not tokens or not ms:
            continue
        gain, dearer = tokens / base_tokens, ms / base_ms
        needed = base_tokens * dearer
        spare = tokens - needed
        kind = "num good" if spare > 0 else "num bad"
        hidden = arm.withheld is not None
        rows.append(
            [
                words(arm.name, "name"),
                number(tokens),
                number(gain),
                number(ms),
                number(dearer),
                number(None if hidden else gain / dearer),
                number(needed),
                number(None) if hidden or arm is base else Cell(f"{spare:+.2f}", spare, kind),
            ]
        )
    note = (
        f"Break-even: the tokens a step must emit to match {base.name} at what the step costs "
        "here. Below it, speculation is slower than not speculating."
    )
    return Table("decomposition", "What each rate is made of", columns, rows, note)


def phase_table(view: RunView) -> Table | None:
    """Milliseconds per step by phase, and each phase's share."""
    arms = [arm for arm in view.measured if arm.phases]
    if not arms:
        return None
    rows = []
    for arm in arms:
        total = sum(arm.phases.values()) or 1
        shares = [number(arm.phases[p], 3, bar=arm.phases[p] / total) for p in PHASES]
        rows.append([words(arm.name, "name"), *shares, number(sum(arm.phases.values()), 3)])
    columns = [("arm", ""), *((phase, "ms per step") for phase in PHASES), ("sum", "ms per step")]
    return Table("phases", "Phases of a step", columns, rows, "Bars show a phase's share.")


def tables(view: RunView) -> dict[str, Table]:
    """Every table the run has material for, by name."""
    makers = (headline_table, comparison_table, decomposition_table, phase_table)
    makers += (cost_table, guard_table, finding_table)
    found = [table for maker in makers if (table := maker(view)) is not None]
    return {table.name: table for table in found}


def _status(arm: ArmView) -> Cell:
    if arm.withheld:
        return words("withheld", "bad")
    status = str(arm.entry.get("status", NONE))
    if status == "ok":
        return words("ok", "good")
    return words(status, "bad" if arm.rate else "soft")


def _range(low: float | None, high: float | None) -> Cell:
    if low is None or high is None:
        return Cell(NONE, kind="num soft")
    return Cell(f"{low:.3f} – {high:.3f}", low, "num")


def _share(value: float | None, top: float) -> float | None:
    return None if value is None else value / top
