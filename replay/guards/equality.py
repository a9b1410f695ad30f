"""The equality guard: in-process arms with one seed must emit the same token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from replay.rows import Row

# (request_id, token ids before the divergence) -> top-2 margin there
MarginOf = Callable[[str, list[int]], float]
# Each margin costs a prefill; the first few show the pattern, the rest stay unknown.
MARGINS = 10


@dataclass(frozen=True)
class Mismatch:
    """Where one arm's output leaves the reference's. A token is None where an output ended."""

    request_id: str
    arm: str
    run: int
    reference: str
    position: int
    expected: int | None
    found: int | None
    margin: float | None = None

    def sentence(self) -> str:
        margin = "unknown" if self.margin is None else f"{self.margin:.3g}"
        return (
            f"request {self.request_id}: {self.arm} (run {self.run}) leaves {self.reference} at "
            f"token {self.position}: {_token(self.expected)} became {_token(self.found)}, "
            f"top-2 margin {margin}"
        )


@dataclass(frozen=True)
class Equality:
    """What the check found, by arm: how many rows were compared, and every mismatch."""

    reference: str | None
    compared: dict[str, int]
    mismatches: tuple[Mismatch, ...]

    def of(self, arm: str) -> dict[str, Any]:
        """The `guards` entry of one arm; `token_ids_equal` is null where nothing was compared."""
        own = [mismatch for mismatch in self.mismatches if mismatch.arm == arm]
        compared = self.compared.get(arm, 0)
        return {
            "token_ids_equal": not own if compared else None,
            "compared_with": self.reference,
            "compared_rows": compared,
            "mismatches": [asdict(mismatch) for mismatch in own],
        }


def check_equality(
    rows: Sequence[Row], arms: Sequence[str], margin_of: MarginOf | None = None
) -> Equality:
    """Compare each row of `arms` with the first arm's first completed row of that request.

    So other arms are compared with the reference, and its own later runs too.
    """
    reference: dict[str, Row] = {}
    usable = [row for row in rows if row.completed and row.token_ids is not None]
    for arm in arms:  # the first arm that completed a request is its reference
        for row in usable:
            if row.arm == arm:
                reference.setdefault(row.request_id, row)
    compared: dict[str, int] = {}
    found: list[Mismatch] = []
    for row in usable:
        base = reference.get(row.request_id)
        if row.arm not in arms or base is None or base is row:
            continue
        compared[row.arm] = compared.get(row.arm, 0) + 1
        position = divergence(base.token_ids, row.token_ids)
        if position is None:
            continue
        margin = None
        if margin_of is not None and len(found) < MARGINS:
            margin = margin_of(row.request_id, row.token_ids[:position])
        found.append(
            Mismatch(
                request_id=row.request_id,
                arm=row.arm,
                run=row.run,
                reference=base.arm,
                position=position,
                expected=_at(base.token_ids, position),
                found=_at(row.token_ids, position),
                margin=margin,
            )
        )
    return Equality(arms[0] if arms else None, compared, tuple(found))


def divergence(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first position where two outputs differ, or None. Ending early is a difference."""
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


def _at(ids: Sequence[int], position: int) -> int | None:
    return ids[position] if position < len(ids) else None


def _token(token: int | None) -> str:
    return "the end" if token is None else f"id {token}"
