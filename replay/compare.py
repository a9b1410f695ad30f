"""`lumotree compare` as a library call: the arms of one run folder, or arms across folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lumotree.errors import CorpusError
from replay.comparison import APART, Side, compare_sides
from replay.context import RunContext
from replay.guards import check_equality
from replay.rows import Row
from replay.runfolder import RunFolder, difference, shared_options
from replay.statistics import pair
from replay.summary import summarise

# Parts of run.json that must agree for a ratio to mean anything; `options` keys by name.
SAME = (
    ("corpus", "sha256"),
    ("model", "weights_sha256"),
    ("model", "dtype"),
    ("sampling", None),
    ("options", "cap"),
)
# Parts that are worth a sentence: comparing machines or row modes may be the purpose.
NOTED = (("machine", "cpu"), ("machine", "cores"), ("model", "device"), ("model", "rows"))


@dataclass(frozen=True)
class Loaded:
    """A run folder read for comparison; its summary is computed anew from its rows."""

    name: str
    run: dict[str, Any]
    rows: list[Row]
    summary: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Loaded:
        """Raises CorpusError for anything but a run folder with rows."""
        folder = RunFolder.open(path)
        rows = folder.rows()
        if not any(row.completed for row in rows):
            raise CorpusError(f"{path} holds no completed request")
        saved = folder.summary() if (path / "summary.json").exists() else None
        return cls(path.resolve().name, folder.run, rows, resummarise(folder.run, rows, saved))

    def side(self, arm: str, label: str) -> Side:
        entry = self.summary["arms"][arm]
        return Side(
            label,
            [row for row in self.rows if row.arm == arm],
            RunContext.of(self.run).conversations,
            entry["reason"] if entry["status"] == "withheld" else None,
        )


def resummarise(
    run: Mapping[str, Any], rows: Sequence[Row], saved: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The summary of saved rows. Only the model can measure margins: they are those `saved`."""
    status = run.get("arms") or {}
    local = [
        name
        for name, arm in status.items()
        if (arm.get("description") or {}).get("kind") == "in-process"
    ]
    check = (run.get("options") or {}).get("check_tokens", True)
    equality = check_equality(rows, local, _margins(saved or {})) if check else None
    summary = summarise(status, rows, equality, run)
    if saved and "warnings" in saved:
        summary["warnings"] = saved["warnings"]
    return summary


def _margins(saved: Mapping[str, Any]) -> Callable[[str, list[int]], float | None]:
    """Margins at divergences, as the run measured them."""
    known = {
        (mismatch["request_id"], mismatch["position"]): mismatch.get("margin")
        for arm in (saved.get("arms") or {}).values()
        for mismatch in (arm.get("guards") or {}).get("mismatches") or ()
    }
    return lambda request, ids: known.get((request, len(ids)))


def compare_folders(
    paths: Sequence[Path], *, baseline: str | None = None, force: bool = False
) -> dict[str, Any]:
    """`lumotree compare`: one folder, its arms; several, each arm against the first folder's.

    With several folders an arm meets its namesake in the first, or `baseline` of the first when
    that is named or there is no namesake. Returns runs, comparisons, differences and notes.
    Raises CorpusError for runs that differ in what must agree, unless `force`, and for an
    unknown baseline.
    """
    runs = [Loaded.read(path) for path in paths]
    first = runs[0]
    if baseline is not None and baseline not in first.summary["arms"]:
        known = ", ".join(first.summary["arms"])
        raise CorpusError(f"{first.name} has no arm '{baseline}'", f"its arms: {known}")
    differences = [text for other in runs[1:] for text in _differences(first, other, SAME)]
    if differences and not force:
        raise CorpusError(
            f"the runs cannot be compared: {'; '.join(differences)}",
            "--force compares them all the same and says so",
        )
    if len(runs) == 1:
        comparisons = _within(first, baseline)
    else:
        comparisons = _across(runs, baseline)
    notes = [text for other in runs[1:] for text in _differences(first, other, NOTED)]
    if len(runs) > 1:
        notes.append(f"{APART}: what an arm of both differs by comes on top of the A/A floor")
    if not any(RunContext.of(run.run).prompts for run in runs):
        notes.append("the run folder names no conversations: requests count as independent")
    return {
        "runs": {_label(runs, i): _about(run) for i, run in enumerate(runs)},
        "comparisons": comparisons,
        "differences": differences,
        "notes": notes,
        "withheld": {
            f"{_label(runs, i)}/{name}" if len(runs) > 1 else name: arm["reason"]
            for i, run in enumerate(runs)
            for name, arm in run.summary["arms"].items()
            if arm["status"] == "withheld"
        },
    }


def _within(run: Loaded, baseline: str | None) -> list[dict[str, Any]]:
    if baseline is None:
        return run.summary["comparisons"]
    base = run.side(baseline, baseline)
    found = [
        compare_sides(run.side(arm, arm), base) for arm in run.summary["arms"] if arm != baseline
    ]
    return [entry for entry in found if entry is not None]


def _across(runs: Sequence[Loaded], baseline: str | None) -> list[dict[str, Any]]:
    first, found = runs[0], []
    default = baseline or first.summary["baseline"]
    for i, run in enumerate(runs):
        for arm in run.summary["arms"]:
            namesake = arm in first.summary["arms"] and baseline is None
            other = arm if namesake and i else default
            if i == 0 and (baseline is None or arm == other):
                continue
            if other is None:
                continue
            entry = compare_sides(
                run.side(arm, f"{_label(runs, i)}/{arm}"),
                first.side(other, f"{_label(runs, 0)}/{other}"),
                same_run=i == 0,
                drift=_drift(first, run, arm) if i else None,
            )
            if entry is not None:
                found.append(entry)
    return found


def _drift(one: Loaded, two: Loaded, compared: str) -> float | None:
    """How far an arm of both folders comes apart between them, relative; None without one.

    It is the first folder's baseline; where that is the arm `compared`, the widest of the others.
    An arm is of both folders when its name and its description agree and no guard withholds it.
    """
    found = {
        name: abs(np.log(pairs.ratio))
        for name in one.summary["arms"]
        if name != compared
        and _same_arm(one, two, name)
        and (pairs := pair(two.side(name, name).rows, one.side(name, name).rows, {},
                           same_run=False)) is not None
    }  # fmt: skip
    if not found:
        return None
    return float(np.expm1(found.get(one.summary["baseline"], max(found.values()))))


def _same_arm(one: Loaded, two: Loaded, arm: str) -> bool:
    described = []
    for run in (one, two):
        entry = run.summary["arms"].get(arm)
        if entry is None or entry["status"] == "withheld":
            return False
        described.append((run.run.get("arms") or {}).get(arm, {}).get("description") or {})
    saved, given = shared_options(*described)
    return saved == given


def _differences(one: Loaded, two: Loaded, parts: Sequence[tuple[str, str | None]]) -> list[str]:
    found = []
    for part, key in parts:
        left, right = one.run.get(part, {}), two.run.get(part, {})
        if key is not None:
            left, right = left.get(key), right.get(key)
        if left != right:
            found.append(difference(f"{part} {key}" if key else part, left, right))
    return list(dict.fromkeys(found))


def _label(runs: Sequence[Loaded], index: int) -> str:
    """Folder names, numbered where two folders have the same."""
    name = runs[index].name
    return name if [run.name for run in runs].count(name) == 1 else f"{name}#{index + 1}"


def _about(run: Loaded) -> dict[str, Any]:
    return {
        "corpus_sha256": run.run.get("corpus", {}).get("sha256"),
        "model": run.run.get("model", {}).get("name"),
        "machine": run.run.get("machine", {}).get("cpu"),
        "runs": max((row.run for row in run.rows), default=0),
        "arms": {
            name: {
                key: arm[key]
                for key in ("pooled_tok_s", "mean_request_tok_s", "aa_floor", "status", "reason")
            }
            for name, arm in run.summary["arms"].items()
        },
    }
