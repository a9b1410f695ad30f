"""The tables of `results/`: stored runs in the paper's shape, its figures beside them.

Tables are made from stored rows alone: every run is summarised again, and its saved summary must
say the same. In a Markdown file a block from `<!-- results:RUN -->` to `<!-- /results -->` is
filled with the sentence and the table of that stored run, `<!-- results:NAME RUN -->` with one
table in the paper's shape, `<!-- results:NAME -->` with that table of every stored run. A block
of a run that is not stored must be empty: nothing is quoted without its rows.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lumotree.errors import CorpusError
from replay import paper
from replay.compare import resummarise
from replay.export import markdown_table
from replay.paper_tables import TABLES, range_cell, rate_cell
from replay.report.cells import Cell, Table, number, words
from replay.report.view import RunView
from replay.report.words import headline, interval_of, verdict_of, why
from replay.runfolder import RunFolder

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
        return RunView.of(folder, resummarise(folder.run, folder.rows(), folder.summary()))

    def fault(self) -> str | None:
        """How the saved summary differs from the rows; None when it does not.

        Everything that is quoted counts. Guards and the cost model explain; what they change of
        a rate, a status or a comparison is seen there.
        """
        found = _difference(_quoted(RunFolder.open(self.path).summary()),
                            _quoted(json.loads(json.dumps(self.view.summary))), "")  # fmt: skip
        return f"{self.path / 'summary.json'}: {found}" if found else None

    def rewrite(self) -> None:
        """Replace the saved summary by that of its rows."""
        RunFolder.open(self.path).write_json("summary.json", self.view.summary)

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


def _quoted(summary: dict[str, Any]) -> dict[str, Any]:
    arms = {
        name: {key: value for key, value in arm.items() if key != "guards"}
        for name, arm in (summary.get("arms") or {}).items()
    }
    left_out = ("cost_model", "warnings")
    return {key: value for key, value in summary.items() if key not in left_out} | {"arms": arms}


def _difference(was: Any, now: Any, where: str) -> str | None:
    """The first value that differs, floats by more than rounding; None when none does."""
    if isinstance(was, dict) and isinstance(now, dict):
        keys = [*now, *(key for key in was if key not in now)]
        pairs = [(was.get(key), now.get(key), f"{where} {key}".strip()) for key in keys]
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        pairs = [(*both, f"{where} {i}") for i, both in enumerate(zip(was, now, strict=True))]
    elif isinstance(was, float | int) and isinstance(now, float | int):
        same = math.isclose(was, now, rel_tol=SAME, abs_tol=SAME)
        return None if same else f"{where} is {was}, rows give {now}"
    else:
        return None if was == now else f"{where} is {_short(was)}, rows give {_short(now)}"
    return next((text for pair in pairs if (text := _difference(*pair)) is not None), None)


def _short(value: Any) -> str:
    text = "missing" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


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
            text += f" ({interval_of(entry)})"
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
    return f"{headline(view.summary)} {why(view) or ''}".strip() + f"\n\n{table}\n\n{run.title}"


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
