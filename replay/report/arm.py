"""One arm of a run, for tables and pictures: nothing is required, nothing withheld is quoted."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lumotree.errors import LumoTreeError
from lumotree.request import PHASES
from lumotree.tree import TreeDescriptor, tree_from_name
from replay.pooling import rates_by_run
from replay.rows import Row


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
        return rates_by_run(self.rows)

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
