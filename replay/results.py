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

from lumotree.errors import CorpusError
from replay import paper
from replay.export import markdown_table
from replay.guards import check_equality
from replay.paper_tables import TABLES, range_cell, rate_cell
from replay.report.cells import Cell, Table, number, words
from replay.report.view import RunView
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
                rate_cell(arm, arm is view.winner),
                range_cell(None if arm.withheld else arm.entry.get("run_range_tok_s")),
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
