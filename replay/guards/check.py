"""The result of one guard, and the evidence guards look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import comb
from typing import Any, Literal

from replay.rows import Row

Status = Literal["pass", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Check:
    """What one guard found. `fail` withholds the arm's headline; `warn` is printed beside it.

    `reason` is a sentence for every status but `pass`; `figures` are the numbers behind it.
    """

    name: str
    status: Status
    reason: str | None = None
    figures: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Prompt:
    """What the run sent, from run.json; None where an older run folder does not say."""

    conversation: str | None = None
    prompt_tokens: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True)
class Evidence:
    """One arm's completed rows in the order they were served, and what to hold them against.

    `baseline` rows are empty for the baseline itself; `baseline_arm` is None for a lone arm.
    `same_output` says that the arm emitted the baseline's tokens: then nothing about the text
    can be this arm's fault.
    """

    arm: str
    rows: Sequence[Row]
    baseline_arm: str | None = None
    baseline: Sequence[Row] = ()
    prompts: Mapping[str, Prompt] = field(default_factory=dict)
    greedy: bool = False
    same_output: bool = False

    def paired(self) -> list[tuple[Row, Row]]:
        """Rows of the arm with the baseline's row of the same run and request."""
        base = {(row.run, row.request_id): row for row in self.baseline}
        return [(row, base[key]) for row in self.rows if (key := (row.run, row.request_id)) in base]

    def by_request(self) -> list[tuple[list[Row], list[Row]]]:
        """The same, all runs of a request together: repeats of a seed are no new evidence."""
        found: dict[str, tuple[list[Row], list[Row]]] = {}
        for ours, base in self.paired():
            mine, theirs = found.setdefault(ours.request_id, ([], []))
            mine.append(ours)
            theirs.append(base)
        return list(found.values())


def sign_test(more: int, less: int) -> float:
    """P(at least `more` of more + less) for fair coins: McNemar's exact one-sided test."""
    n = more + less
    return sum(comb(n, k) for k in range(more, n + 1)) / 2**n


def at(requests: Sequence[str], limit: int = 3) -> str:
    """Request ids for a sentence: the first few."""
    shown = ", ".join(requests[:limit])
    return shown if len(requests) <= limit else f"{shown} and {len(requests) - limit} more"
