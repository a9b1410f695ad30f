"""Tables in the paper's shape: a run's figures, the paper's beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lumotree.request import PHASES
from replay import paper
from replay.report.arm import ArmView
from replay.report.cells import Cell, Table, number, words
from replay.report.view import RunView
from replay.report.words import verdict_of

DRAFTING_VARIANTS = (
    "lumotree:passes",
    "lumotree:draft_vocab",
    "lumotree:draft_weights",
    "lumotree:suffix",
)


def replay_table(view: RunView) -> Table:
    """Decode rates, the paper's beside them."""
    theirs = paper.RATES[paper.role(view.corpus)]
    ratios = {entry["arm"]: entry for entry in view.comparisons}
    base = view.baseline.name if view.baseline else "baseline"
    columns = [("arm", ""), ("tok/s", ""), ("runs", "tok/s"), (f"× {base}", ""), ("verdict", "")]
    columns += [("paper", "tok/s"), ("paper runs", "tok/s"), ("paper × ar", "")]
    rows = []
    for name in _names(view, theirs):
        arm, rate, entry = view.arms.get(name), theirs.get(name), ratios.get(name)
        rows.append(
            [
                words(name),
                rate_cell(arm),
                range_cell(arm.entry.get("run_range_tok_s") if arm and not arm.withheld else None),
                number(entry.get("ratio") if entry else None),
                words(verdict_of(view, entry) if entry else None),
                number(rate.tok_s if rate else None),
                range_cell((rate.low, rate.high) if rate and rate.low else None),
                number(rate.tok_s / theirs["ar"].tok_s if rate else None),
            ]
        )
    return Table("replay", "Replay", columns, rows)


def step_table(view: RunView) -> Table:
    """Cost and yield of a step."""
    columns = [("arm", ""), ("ms", "per step"), ("tokens", "per step")]
    columns += [("paper", "ms per step"), ("paper", "tokens per step")]
    rows = []
    for name in _names(view, paper.STEPS):
        arm, step = view.arms.get(name), paper.STEPS.get(name)
        rows.append(
            [
                words(name),
                number(arm.number("ms_per_step") if arm else None),
                number(arm.number("tokens_per_step") if arm else None),
                number(step.ms if step else None, 1),
                number(step.tokens if step else None),
            ]
        )
    return Table("steps", "Per step", columns, rows)


def phase_table(view: RunView) -> Table:
    """Phases of a step; the paper's target, draft and dispatch spans beside them."""
    columns = [("arm", ""), *((phase, "ms") for phase in PHASES), ("step", "ms")]
    columns += [(f"paper {span}", "ms") for span in ("target", "draft", "dispatch", "step")]
    rows = []
    names = [arm.name for arm in view.measured if arm.phases]
    for name in [*names, *(n for n in paper.SPANS if n in view.arms and n not in names)]:
        arm, spans = view.arms[name], paper.SPANS.get(name)
        theirs = (spans.target, spans.draft, spans.dispatch, spans.step) if spans else (None,) * 4
        rows.append(
            [
                words(name),
                *(number(arm.phases.get(phase)) for phase in PHASES),
                number(arm.number("ms_per_step")),
                *(number(value) for value in theirs),
            ]
        )
    return Table("phases", "Phases", columns, rows)


def drafting_table(view: RunView) -> Table:
    """The tree arm and its variants that draft otherwise; the paper's where it has them."""
    columns = [("arm", ""), ("tok/s", ""), ("accepted", "per step"), ("draft", "ms")]
    columns += [("step", "ms"), ("paper", "tok/s"), ("paper accepted", "per step")]
    columns += [("paper draft", "ms"), ("paper step", "ms")]
    rows = []
    nothing = dict.fromkeys(("tok_s", "accepted", "draft_ms", "step_ms"))
    names = [name for name in paper.DRAFTING if name in view.arms]
    names += [
        arm.name
        for arm in view.measured
        if arm.name not in names and arm.name.startswith(DRAFTING_VARIANTS)
    ]
    for name in names:
        arm = view.arms[name]
        theirs = vars(paper.DRAFTING[name]) if name in paper.DRAFTING else nothing
        drafts = sum(arm.accepted_by_source.values())
        rows.append(
            [
                words(name),
                rate_cell(arm),
                number(drafts / arm.steps if arm.steps else None),
                number(arm.phases.get("draft")),
                number(arm.number("ms_per_step")),
                *(number(theirs[key]) for key in nothing),
            ]
        )
    return Table("drafting", "Drafting passes", columns, rows)


TABLES: dict[str, Callable[[RunView], Table]] = {
    "replay": replay_table,
    "steps": step_table,
    "phases": phase_table,
    "drafting": drafting_table,
}


def _names(view: RunView, theirs: dict[str, Any]) -> list[str]:
    """Arms of the run and of the paper: the paper's order first, then ours."""
    ours = [arm.name for arm in view.measured if arm.name not in theirs]
    return [*theirs, *ours]


def rate_cell(arm: ArmView | None, best: bool = False) -> Cell:
    if arm is not None and arm.withheld:
        return Cell("withheld", kind="num bad")
    return number(arm.quoted if arm else None, kind="best" if best else "")


def range_cell(pair: Any) -> Cell:
    return Cell(f"{pair[0]:.2f}–{pair[1]:.2f}", kind="num") if pair else number(None)
