"""What an audit finds: checks, and their groups in a report."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. Checks of one `name` form a line of the report.

    place: where, such as "prefix 2, schedule a". step: what a fault's first detection is told in
    (the cycle of a continuation, the captured step of a sampler), None where time plays no part.
    figures: measured values, the larger the worse.
    """

    name: str
    place: str
    passed: bool
    reason: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    step: int | None = None

    @property
    def sentence(self) -> str:
        return f"{self.name}, {self.place}: {self.reason}" if self.reason else self.name


@dataclass
class Line:
    """All checks of one name: how many passed, the worst of each figure, the first failure."""

    name: str
    passed: int = 0
    total: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    first_failure: str | None = None

    def add(self, check: Check) -> None:
        self.total += 1
        self.passed += check.passed
        for key, value in check.figures.items():
            self.figures[key] = worst(self.figures.get(key, value), value)
        if not check.passed and self.first_failure is None:
            self.first_failure = f"{check.place}: {check.reason}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON: a figure that is not finite is null."""
        finite = {k: v if math.isfinite(v) else None for k, v in self.figures.items()}
        return asdict(self) | {"figures": finite}


def worst(a: float, b: float) -> float:
    """The larger value; NaN above all, which `max` would drop when it comes second."""
    return a if math.isnan(a) or b <= a else b


def lines(checks: Iterable[Check]) -> list[Line]:
    """Checks by name, in order of appearance."""
    found: dict[str, Line] = {}
    for check in checks:
        found.setdefault(check.name, Line(check.name)).add(check)
    return list(found.values())
