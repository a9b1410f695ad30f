"""A run folder as tables, pictures and exports see it: its saved files, with nothing required.

Folders of earlier versions lack keys that later ones have, so a missing figure is None here and
an empty place in the report, never an error. Token ids are dropped row by row: a run of 10,000
rows holds tens of millions of them, and no picture needs one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lumotree.errors import CorpusError, LumoTreeError
from lumotree.request import PHASES
from lumotree.tree import TreeDescriptor, tree_from_name
from replay.rows import Row
from replay.runfolder import RunFolder

BASELINE = "ar"


@dataclass(frozen=True)
class ArmView:
    """One arm: its summary entry, what run.json says of it, and its measured rows."""

    name: str
    entry: dict[str, Any]
    description: dict[str, Any]
    rows: list[Row] = field(repr=False)

    def number(self, key: str) -> float | None:
        """A figure of the summary; None when it was not measured or not kept."""
        value = self.entry.get(key)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    @property
    def withheld(self) -> str | None:
        """Why this arm's speed must not be quoted; None when it may be."""
        if self.entry.get("status") == "withheld":
            return str(self.entry.get("reason") or "a guard failed")
        # The first version kept the rate of an arm whose one guard had failed.
        failed = [str(c["reason"] or c["name"]) for c in self.checks if c["status"] == "fail"]
        return "; ".join(failed) or None

    @cached_property
    def checks(self) -> list[dict[str, Any]]:
        """Guards as name, status (pass, warn, fail, skip) and reason.

        Folders of the first version know one guard, the equality of token ids.
        """
        guards = self.entry.get("guards") or {}
        if "checks" in guards:
            return [{"reason": None, **check} for check in guards["checks"]]
        if "token_ids_equal" not in guards:
            return []
        own = guards.get("mismatches") or []
        status = {True: "pass", False: "fail"}.get(guards["token_ids_equal"], "skip")
        reason = {"pass": None, "skip": "nothing to compare with"}.get(
            status, f"token ids differ from {guards.get('compared_with')} in {len(own)} rows"
        )
        return [{"name": "token_ids", "status": status, "reason": reason}]

    @property
    def rate(self) -> float | None:
        """The pooled rate as measured, withheld or not."""
        kept = (self.entry.get("withheld") or {}).get("pooled_tok_s")
        return self.number("pooled_tok_s") or kept

    @property
    def quoted(self) -> float | None:
        """The pooled rate where it may be quoted."""
        return None if self.withheld else self.rate

    @property
    def run_rates(self) -> dict[int, float]:
        """The pooled rate of each run."""
        sums: dict[int, list[float]] = {}
        for row in self.rows:
            tokens, seconds = sums.setdefault(row.run, [0.0, 0.0])
            sums[row.run] = [tokens + row.completion_tokens - 1, seconds + row.decode_s]
        return {run: tokens / s for run, (tokens, s) in sorted(sums.items()) if s > 0}

    @property
    def phases(self) -> dict[str, float]:
        """Milliseconds per step by phase; empty when the arm reports none."""
        found = self.entry.get("phases_ms_per_step") or {}
        return {phase: found.get(phase, 0.0) for phase in PHASES} if found else {}

    @property
    def survival(self) -> list[float]:
        return list(self.entry.get("survival_by_depth") or ())

    @cached_property
    def steps(self) -> int:
        return sum(row.steps or 0 for row in self.rows)

    @cached_property
    def accepted_by_source(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for row in self.rows:
            for source, count in row.accepted_by_source.items():
                found[source] = found.get(source, 0) + count
        return found

    @cached_property
    def accepted_by_row(self) -> list[int]:
        """Steps whose accepted path held each tree row; empty where rows did not count it."""
        width = max((len(row.accepted_by_row) for row in self.rows), default=0)
        totals = [0] * width
        for row in self.rows:
            for index, count in enumerate(row.accepted_by_row):
                totals[index] += count
        return totals

    @property
    def tree(self) -> TreeDescriptor | None:
        """The descriptor this arm drafted with; None for an external arm."""
        try:
            return tree_from_name(str(self.description["tree"]))
        except (KeyError, LumoTreeError):
            return None


@dataclass(frozen=True)
class RunView:
    """A finished run: run.json, summary.json, and the rows by arm without warm-ups."""

    path: Path
    run: dict[str, Any]
    summary: dict[str, Any]
    arms: dict[str, ArmView]
    failed: list[Row] = field(repr=False)

    @classmethod
    def load(cls, path: Path) -> RunView:
        """Read a run folder. Raises CorpusError when it is none or has no summary yet."""
        folder = RunFolder.open(path)
        return cls.of(folder, folder.summary())

    @classmethod
    def of(cls, folder: RunFolder, summary: dict[str, Any]) -> RunView:
        """A run folder under a summary of its rows. Raises CorpusError."""
        if not isinstance(summary.get("arms"), dict):
            raise CorpusError(f"{folder.path / 'summary.json'} is not the summary of a replay")
        by_arm: dict[str, list[Row]] = {name: [] for name in summary["arms"]}
        failed = []
        for row in stream_rows(folder.path / "requests.jsonl"):
            if row.completed:
                by_arm.setdefault(row.arm, []).append(row)
            elif not row.warmup:
                failed.append(row)
        described = folder.run.get("arms") or {}
        arms = {
            name: ArmView(
                name, entry, (described.get(name) or {}).get("description") or {}, by_arm[name]
            )
            for name, entry in summary["arms"].items()
        }
        return cls(folder.path, folder.run, summary, arms, failed)

    @property
    def measured(self) -> list[ArmView]:
        """Arms with a rate, withheld or not, in the order of the run."""
        return [arm for arm in self.arms.values() if arm.rate is not None]

    @property
    def baseline(self) -> ArmView | None:
        """Plain decoding, else the arm the summary compares with, else the first measured one."""
        names = [
            self.summary.get("baseline"),
            BASELINE,
            *(entry.get("baseline") for entry in self.comparisons),
        ]
        found = {arm.name: arm for arm in self.measured}
        return next((found[name] for name in names if name in found), None) or next(
            iter(found.values()), None
        )

    @property
    def winner(self) -> ArmView | None:
        """The fastest arm whose rate may be quoted."""
        quoted = [arm for arm in self.arms.values() if arm.quoted is not None]
        return max(quoted, key=lambda arm: arm.quoted or 0.0, default=None)

    @property
    def comparisons(self) -> list[dict[str, Any]]:
        return list(self.summary.get("comparisons") or ())

    @property
    def machine(self) -> str:
        """Where it ran, in a few words: a rate without it says nothing."""
        machine, model = self.run.get("machine") or {}, self.run.get("model") or {}
        cores = machine.get("cores", "?")
        where = f"{machine.get('cpu', 'unknown processor')}, {cores} cores"
        if not str(model.get("device", "cpu")).startswith("cpu"):
            gpu = machine.get("gpu") or model.get("device_name") or model["device"]
            where = str(gpu.get("name", "GPU") if isinstance(gpu, dict) else gpu)
        return where.replace("(R)", "").replace("(TM)", "")

    @property
    def corpus(self) -> str:
        return Path(str(self.run.get("corpus_path") or "corpus")).name

    @property
    def model(self) -> str:
        model = self.run.get("model") or {}
        name = model.get("name") or (self.run.get("options") or {}).get("model") or "unknown"
        # A checkpoint folder is known by its name; where it lies is nobody's business.
        return Path(str(name)).name

    @property
    def caption(self) -> str:
        return f"{self.corpus} · model {self.model} · {self.machine}"


def stream_rows(path: Path) -> Iterator[Row]:
    """Rows one at a time without token ids; a torn last line is left out. Raises CorpusError."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                row = Row.model_validate_json(line)
            except ValidationError as error:
                reason = error.errors(include_url=False)[0]["msg"]
                raise CorpusError(f"{path} line {number} is not a row: {reason}") from None
            row.token_ids = None
            yield row
