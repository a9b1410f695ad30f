"""A run folder as tables, pictures and exports see it: its saved files, with nothing required.

Folders of earlier versions lack keys that later ones have, so a missing figure is None here and
an empty place in the report, never an error. Token ids are dropped row by row: a run of 10,000
rows holds tens of millions of them, and no picture needs one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lumotree.errors import CorpusError
from replay.report.arm import ArmView
from replay.rows import Row
from replay.runfolder import RunFolder

BASELINE = "ar"


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
        """The fastest complete arm whose rate may be quoted."""
        quoted = [
            arm
            for arm in self.arms.values()
            if arm.quoted is not None and arm.entry.get("status", "ok") == "ok"
        ]
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
        label = (self.run.get("model") or {}).get("label")
        model = f"{self.model} ({label})" if label else self.model
        return f"{self.corpus} · model {model} · {self.machine}"


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
