"""The tables of `results/`: stored runs in the paper's shape, its figures beside them.

Tables are made from stored rows alone: every run is summarised again, and its saved summary must
say the same. In a Markdown file a block from `<!-- results:RUN -->` to `<!-- /results -->` is
filled with the sentence and the table of that stored run, `<!-- results:NAME RUN -->` with one
table in the paper's shape, `<!-- results:NAME -->` with that table of every stored run. A block
of a run that is not stored must be empty: nothing is quoted without its rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lumotree.errors import CorpusError
from lumotree.request import PHASES
from replay import paper
from replay.export import markdown_table
from replay.guards import check_equality
from replay.report.cells import Cell, Table, number, words
from replay.report.view import ArmView, RunView
from replay.report.words import headline, verdict_of, why
from replay.runfolder import RunFolder
from replay.summary import summarise

BLOCK = re.compile(
    r"(?P<open><!-- results:(?P<name>[\w./-]+)(?: (?P<run>[\w./-]+))? -->\n)"
    r"(?P<body>.*?)(?P<close><!-- /results -->)",
    re.DOTALL,
)
NO_RUN = "No run is stored yet."
# Sums over rows in another order differ in the last bits; a changed row differs by more.
SAME = 1e-9


@dataclass(frozen=True)
class Stored:
    """One run folder under `results/`; `name` is its path there."""

    name: str
    path: Path

    @cached_property
    def view(self) -> RunView:
        """The run with a summary made from its rows now."""
        folder = RunFolder.open(self.path)
        rows = folder.rows()
        described = folder.run.get("arms") or {}
        local = [
            name
            for name, arm in described.items()
            if (arm.get("description") or {}).get("kind") == "in-process"
        ]
        checked = (folder.run.get("options") or {}).get("check_tokens", True)
        equality = check_equality(rows, local, self._margins()) if checked else None
        return RunView.of(folder, summarise(described, rows, equality, folder.run))

    def _margins(self) -> Callable[[str, list[int]], float | None]:
        """Margins at divergences, as the run measured them: only the model can."""
        saved = RunFolder.open(self.path).summary()["arms"].values()
        known = {
            (mismatch["request_id"], mismatch["position"]): mismatch["margin"]
            for arm in saved
            for mismatch in (arm.get("guards") or {}).get("mismatches") or ()
        }
        return lambda request, ids: known.get((request, len(ids)))

    def fault(self) -> str | None:
        """How the saved summary differs from the rows; None when it does not."""
        saved = RunFolder.open(self.path).summary()["arms"]
        for name, arm in self.view.arms.items():
            for key in ("pooled_tok_s", "ms_per_step", "tokens_per_step", "completion_tokens"):
                was, now = (saved.get(name) or {}).get(key), arm.entry[key]
                if (was is None) != (now is None) or (now and abs(was - now) > SAME * abs(now)):
                    return f"{self.path / 'summary.json'}: {name} {key} is {was}, rows give {now}"
        return None

    @property
    def title(self) -> str:
        """Machine, model, corpus and day, under the table's name."""
        view = self.view
        options, day = view.run.get("options") or {}, str(view.run.get("started_at") or "")[:10]
        requests = len({row.request_id for arm in view.measured for row in arm.rows})
        said = [f"`{self.name}`", view.machine, f"model {view.model}"]
        said += [f"{view.corpus}, {requests} requests, cap {options.get('cap', '?')}"]
        said += [f"{options.get('runs', '?')} runs"] + ([day] if day else [])
        return " · ".join(said)


def stored_runs(results: Path) -> list[Stored]:
    """Run folders under `results`, by name: those with rows; other folders have none."""
    paths = sorted(path.parent for path in results.rglob("requests.jsonl"))
    return [Stored(path.relative_to(results).as_posix(), path) for path in paths]


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
                _rate(arm),
                _range(arm.entry.get("run_range_tok_s") if arm and not arm.withheld else None),
                number(entry.get("ratio") if entry else None),
                words(verdict_of(view, entry) if entry else None),
                number(rate.tok_s if rate else None),
                _range((rate.low, rate.high) if rate and rate.low else None),
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
    """Variants that draft with fewer passes."""
    columns = [("arm", ""), ("tok/s", ""), ("accepted", "per step"), ("draft", "ms")]
    columns += [("step", "ms"), ("paper", "tok/s"), ("paper accepted", "per step")]
    columns += [("paper draft", "ms"), ("paper step", "ms")]
    rows = []
    for name in (name for name in paper.DRAFTING if name in view.arms):
        arm, theirs = view.arms[name], paper.DRAFTING[name]
        drafts = sum(arm.accepted_by_source.values())
        rows.append(
            [
                words(name),
                _rate(arm),
                number(drafts / arm.steps if arm.steps else None),
                number(arm.phases.get("draft")),
                number(arm.number("ms_per_step")),
                *(number(v) for v in (theirs.tok_s, theirs.accepted)),
                *(number(v) for v in (theirs.draft_ms, theirs.step_ms)),
            ]
        )
    return Table("drafting", "Drafting passes", columns, rows)


TABLES: dict[str, Callable[[RunView], Table]] = {
    "replay": replay_table,
    "steps": step_table,
    "phases": phase_table,
    "drafting": drafting_table,
}


def overview(run: Stored) -> str:
    """One run for a README: the sentence, its table and where it was measured."""
    view = run.view
    columns = [("arm", ""), ("tok/s", ""), ("runs", "tok/s")]
    columns += [(f"× {view.baseline.name if view.baseline else 'baseline'}", "95 % interval")]
    columns += [("tokens", "per step"), ("ms", "per step"), ("status", "")]
    ratios = {entry["arm"]: entry for entry in view.comparisons}
    rows = []
    for arm in view.arms.values():
        entry = ratios.get(arm.name, {})
        ratio = number(entry.get("ratio"))
        if entry.get("ci_low") and entry.get("ratio"):
            text = f"{ratio.text} [{entry['ci_low']:.2f}, {entry['ci_high']:.2f}]"
            ratio = Cell(text, ratio.key, ratio.kind)
        rows.append(
            [
                words(arm.name),
                _rate(arm, arm is view.winner),
                _range(None if arm.withheld else arm.entry.get("run_range_tok_s")),
                ratio,
                number(arm.number("tokens_per_step")),
                number(arm.number("ms_per_step")),
                words(arm.withheld or arm.entry.get("reason") or verdict_of(view, entry))
                if arm.withheld or entry or arm.entry.get("reason")
                else words("baseline" if arm is view.baseline else arm.entry.get("status")),
            ]
        )
    table = markdown_table(Table("overview", run.name, columns, rows))
    return f"{headline(view)} {why(view) or ''}".strip() + f"\n\n{table}\n\n{run.title}"


def block(name: str, runs: list[Stored]) -> str:
    """The Markdown of one table of the paper's shape, for each of `runs`."""
    parts = []
    for run in runs:
        table = TABLES[name](run.view)
        if table.rows:
            beside = f"Columns of the paper: {paper.SOURCE}."
            parts.append(f"{run.title}\n\n{markdown_table(table)}\n\n{beside}")
    return "\n\n".join(parts) or NO_RUN


def fill(text: str, runs: list[Stored], where: str) -> str:
    """`text` with every block filled. Raises CorpusError naming file and block."""
    stored = {run.name: run for run in runs}

    def filled(match: re.Match[str]) -> str:
        name, wanted = match["name"], match["run"]
        table = name in TABLES
        run = wanted if table else name
        if run is not None and run not in stored:
            if match["body"].strip():
                valid = ", ".join([*TABLES, *stored])
                raise CorpusError(
                    f"{where}: '{run}' is quoted but not stored", f"tables and runs: {valid}"
                )
            return match[0]
        chosen = runs if run is None else [stored[run]]
        body = block(name, chosen) if table else overview(chosen[0])
        return f"{match['open']}{body}\n{match['close']}"

    opened = len(re.findall(r"<!-- results:", text))
    if opened != len(BLOCK.findall(text)):
        raise CorpusError(f"{where}: a results block is malformed or not closed")
    return BLOCK.sub(filled, text)


def _names(view: RunView, theirs: dict[str, Any]) -> list[str]:
    """Arms of the run and of the paper: the paper's order first, then ours."""
    ours = [arm.name for arm in view.measured if arm.name not in theirs]
    return [*theirs, *ours]


def _rate(arm: ArmView | None, best: bool = False) -> Cell:
    if arm is not None and arm.withheld:
        return Cell("withheld", kind="num bad")
    return number(arm.quoted if arm else None, kind="best" if best else "")


def _range(pair: Any) -> Cell:
    return Cell(f"{pair[0]:.2f}–{pair[1]:.2f}", kind="num") if pair else number(None)
