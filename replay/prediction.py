"""From measured acceptance and cost to the tree that should be fastest. No torch in here.

A tree was decoded with, and each of its rows counted: how often drafted, how often on the
accepted path. Any part of it that is closed under parents and keeps each row's drafter would
have accepted the same rows, so its tokens per step are known without running it:
1 + sum of reach over its rows. Taking rows by falling reach gives the best part of each size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lumotree.draft.plan import draft_plan
from lumotree.tree import TreeDescriptor, tree_from_name
from replay.costmodel import CostModel


@dataclass(frozen=True)
class Reach:
    """Shares of steps by row of one measured design; row 0 is the root, 1.0 in both.

    reach: the accepted path held the row. active: the row carried a draft.
    """

    tree: str
    passes: int
    suffix: bool
    steps: int
    reach: tuple[float, ...]
    active: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Candidate:
    """A part of a measured tree and what is predicted for it; rows are means per step."""

    tree: str
    passes: int
    suffix: bool
    rows: float
    tokens_per_step: float
    ms_per_step: float

    @property
    def tok_s(self) -> float:
        return 1000 * self.tokens_per_step / self.ms_per_step

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"tok_s": self.tok_s}


def candidates(measured: Sequence[Reach], cost: CostModel) -> list[Candidate]:
    """Every part considered, fastest first; one per tree, passes and suffix.

    Steps that cost nothing or less are an extrapolation, not a prediction, and are left out.
    So is everything when the error of the cost is not known: as many trees as coefficients.
    """
    if cost.loo_rmse_ms is None:
        return []
    found: dict[tuple[str, int, bool], Candidate] = {}
    for reach in measured:
        for rows in parts(reach):
            candidate = predict(reach, rows, cost)
            if candidate is not None and candidate.ms_per_step > 0:
                key = (candidate.tree, candidate.passes, candidate.suffix)
                found.setdefault(key, candidate)
    return sorted(found.values(), key=lambda c: -c.tok_s)


def parts(reach: Reach) -> Iterator[tuple[int, ...]]:
    """Row sets of each size by falling reach, from the root alone to all that was ever drafted."""
    tree = tree_from_name(reach.tree)
    drafted = [
        row for row in range(1, len(reach.reach)) if reach.active[row] > 0 and row < len(tree)
    ]
    # Equal reach goes by depth, so that a parent never follows its child.
    order = sorted(drafted, key=lambda row: (-reach.reach[row], tree.depth[row], row))
    for size in range(len(order) + 1):
        yield (0, *sorted(order[:size]))


def predict(reach: Reach, rows: Sequence[int], cost: CostModel) -> Candidate | None:
    """What the part `rows` of a measured tree should do; None when it is no part.

    No part: not closed under parents, or pruning would give a row to another drafter.
    """
    tree = tree_from_name(reach.tree)
    part, passes, suffix = prune(tree, rows, reach.passes)
    if part is None:
        return None
    mean_rows = sum(reach.active[row] for row in rows)
    return Candidate(
        tree=part,
        passes=passes,
        suffix=suffix and reach.suffix,
        rows=mean_rows,
        tokens_per_step=sum(reach.reach[row] for row in rows),
        ms_per_step=cost.predict(passes, mean_rows),
    )


def prune(tree: TreeDescriptor, rows: Sequence[int], passes: int) -> tuple[str | None, int, bool]:
    """The tree of `rows` by name, the passes it needs, and whether any row wants suffix drafts.

    The name is None when `rows` is no part of `tree` that keeps every row's drafter.
    """
    kept = sorted(rows)
    place = {row: i for i, row in enumerate(kept)}
    if kept[0] != 0 or any(tree.parents[row] not in place for row in kept[1:]):
        return None, 0, False
    parents = ",".join(str(place.get(tree.parents[row], -1)) for row in kept)
    part = tree_from_name(_named(parents, len(kept)))
    before = drafters(tree, passes)
    needed = sum(1 for row in kept if before.get(row, ("",))[0] == "spine")
    after = drafters(part, needed)
    if any(before.get(row) != after.get(place[row]) for row in kept[1:]):
        return None, 0, False
    suffix = any(before[row][0] in ("suffix", "rescue") for row in kept[1:])
    return part.name, needed, suffix


def drafters(tree: TreeDescriptor, passes: int) -> dict[int, tuple[str, int, int]]:
    """Row -> (source, depth of its start, rank): what `draft.plan.fill` would put there."""
    plan = draft_plan(tree, passes)
    found: dict[int, tuple[str, int, int]] = {}
    for depth, (spine, *runner_ups) in enumerate(plan.mtp, start=1):
        found[spine] = ("spine", depth, 0)
        for rank, row in enumerate(runner_ups, start=1):
            found[row] = ("runner-up", depth, rank)
    for rank, row in enumerate(plan.tail):
        found[row] = ("suffix", len(plan.mtp), rank)
    for runner_up, *chain in plan.rescues:
        _, depth, of = found[runner_up]
        for rank, row in enumerate(chain):
            found[row] = ("rescue", depth, 100 * of + rank)
    return found


def _named(parents: str, rows: int) -> str:
    """Preset names where there is one: they read better in a table."""
    chain = ",".join(str(row) for row in range(-1, rows - 1))
    if parents != chain:
        return parents
    return "root" if rows == 1 else f"chain-{rows - 1}"
