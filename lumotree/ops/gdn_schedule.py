"""Which program visits which rows: walks over a tree for `lumotree.ops.gdn_kernels`.

A walk is one program's work: a chain of advancing visits from a stored state, and visits that
only read the state reached so far. A leaf never advances, so it costs a little more than half of
an inner row. Plain Python: no torch in here.

Schedules (bits do not depend on the choice, only time does):
  cut      the path schedule of the descriptor, one launch a level; states that a later level
           starts from are handed over in a buffer (arXiv 2609.23900, path-parallel scan)
  paths    every root-to-leaf path from the pre-tree state, one launch, no buffer
  twigs    heavy chains from the pre-tree state; a leaf beside a chain is read on the way; only
           the way to a side chain is recomputed, and of that only what advances the state
  store    as cut, but every row's state goes to the slot of its row (native path baseline)
  split    the same as twigs, but many leaves beside a chain get a walk of their own
  fine     the same as split, but no such walk has more than a few leaves
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lumotree.tree import TreeDescriptor

EMIT, ADVANCE = 1, 2
SCHEDULES = ("split", "fine", "twigs", "paths", "cut", "store")
# A chain of more than this many leaves beside it gives them away to a walk of their own.
TWIGS_KEPT = 2
# Leaves of one walk of `fine`.
TWIGS_TOGETHER = 4


@dataclass(frozen=True)
class Visit:
    """One row in a walk. `cut` is the slot its state is stored to, -1 for none."""

    row: int
    emit: bool
    advance: bool
    cut: int = -1

    @property
    def entry(self) -> int:
        return self.row << 2 | self.emit * EMIT | self.advance * ADVANCE


@dataclass(frozen=True)
class Walk:
    """`source` is the cut slot the walk starts from, -1 for the pre-tree state."""

    visits: tuple[Visit, ...]
    source: int = -1

    @property
    def advances(self) -> int:
        return sum(visit.advance for visit in self.visits)

    @property
    def cost(self) -> int:
        """Multiply-add slots per element: two products for a read, two more to advance."""
        return sum(1 + visit.emit + 2 * visit.advance for visit in self.visits)


@dataclass(frozen=True)
class Schedule:
    """Walks of each launch, longest first; `cuts` states are handed between launches."""

    name: str
    launches: tuple[tuple[Walk, ...], ...]
    cuts: int

    @property
    def walks(self) -> tuple[Walk, ...]:
        return tuple(walk for launch in self.launches for walk in launch)

    def tables(self) -> tuple[list[list[int]], list[list[int]]]:
        """Rows of the kernel's `walk_ptr` and `visit_ptr`; the latter ends in two idle entries."""
        walks, visits = [], []
        for walk in self.walks:
            start = len(visits)
            visits += [[visit.entry, visit.cut] for visit in walk.visits]
            entries = [*(visit.entry for visit in walk.visits), 0][:2]
            walks.append([start, len(visits), walk.advances, walk.source, *entries])
        return walks, [*visits, [0, -1], [0, -1]]

    def check(self, tree: TreeDescriptor) -> None:
        """Every row is emitted once, from its parent's state. Raises ValueError."""
        emitted: list[int] = []
        slot_row: dict[int, int] = {}
        for walk in self.walks:
            at = slot_row[walk.source] if walk.source >= 0 else -1
            for visit in walk.visits:
                if tree.parents[visit.row] != at:
                    raise ValueError(f"{self.name}: row {visit.row} visited at the state of {at}")
                if visit.emit:
                    emitted.append(visit.row)
                if visit.advance:
                    at = visit.row
                if visit.cut >= 0:
                    slot_row[visit.cut] = at
        if sorted(emitted) != list(range(len(tree))):
            raise ValueError(f"{self.name} does not emit every row of {tree.name} once")


@lru_cache(maxsize=256)
def plan(tree: TreeDescriptor, name: str) -> Schedule:
    """The schedule `name` of a tree whose rows are all active."""
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}; one of {', '.join(SCHEDULES)}")
    if name in ("cut", "store"):
        schedule = _cut(tree, store=name == "store")
    elif name == "paths":
        schedule = _paths(tree)
    else:
        together = TWIGS_TOGETHER if name == "fine" else len(tree)
        kept = len(tree) if name == "twigs" else TWIGS_KEPT
        schedule = Schedule(name, (_launch(_chains(tree, kept, together)),), 0)
    schedule.check(tree)
    return schedule


def _launch(walks: list[Walk]) -> tuple[Walk, ...]:
    return tuple(sorted(walks, key=lambda walk: (-walk.cost, walk.visits[0].row)))


def _paths(tree: TreeDescriptor) -> Schedule:
    seen: set[int] = set()
    walks = []
    for leaf in (row for row in range(len(tree)) if not tree.children[row]):
        path = tree.root_paths[leaf]
        walks.append(Walk(tuple(Visit(row, row not in seen, row != leaf) for row in path)))
        seen.update(path)
    return Schedule("paths", (_launch(walks),), 0)


def _cut(tree: TreeDescriptor, store: bool) -> Schedule:
    starts = sorted({path.parent for path in tree.schedule} - {-1})
    slots = dict(enumerate(range(len(tree)))) if store else {r: i for i, r in enumerate(starts)}
    levels: list[list[Walk]] = [[] for _ in range(tree.schedule[-1].level + 1)]
    for path in tree.schedule:
        visits = tuple(
            Visit(row, True, store or bool(tree.children[row]), slots.get(row, -1))
            for row in path.rows
        )
        levels[path.level].append(Walk(visits, slots.get(path.parent, -1)))
    launches = tuple(_launch(walks) for walks in levels)
    return Schedule("store" if store else "cut", launches, len(slots))


def _chains(tree: TreeDescriptor, kept: int, together: int) -> list[Walk]:
    """Heavy chains; leaf children beside a chain are its twigs.

    A chain of more than `kept` twigs leaves them to walks of at most `together` each.
    """
    walks = []
    todo = [0]
    while todo:
        start = todo.pop()
        before = [Visit(row, False, True) for row in tree.root_paths[start][:-1]]
        chain: list[int] = [start]
        twigs: dict[int, list[int]] = {}
        while (child := tree.heavy_child[chain[-1]]) >= 0:
            beside = [row for row in tree.children[chain[-1]] if row != child]
            twigs[chain[-1]] = [row for row in beside if not tree.children[row]]
            todo += [row for row in beside if tree.children[row]]
            chain.append(child)
        inner, leaf = chain[:-1], chain[-1]
        count = sum(len(rows) for rows in twigs.values())
        groups = [] if count <= kept else _grouped(twigs, together)
        main = list(before)
        for row in inner:
            main.append(Visit(row, True, True))
            main += [Visit(twig, True, False) for twig in twigs[row] if not groups]
        walks.append(Walk((*main, Visit(leaf, True, False))))
        for group in groups:
            apart = list(before)
            for row in inner[: inner.index(max(group)) + 1]:
                apart.append(Visit(row, False, True))
                apart += [Visit(twig, True, False) for twig in group.get(row, [])]
            walks.append(Walk(tuple(apart)))
    return walks


def _grouped(twigs: dict[int, list[int]], together: int) -> list[dict[int, list[int]]]:
    """Twigs by the row they hang from, in order, cut into groups of at most `together`."""
    flat = [(row, twig) for row, rows in twigs.items() for twig in rows]
    groups = []
    for start in range(0, len(flat), together):
        group: dict[int, list[int]] = {}
        for row, twig in flat[start : start + together]:
            group.setdefault(row, []).append(twig)
        groups.append(group)
    return groups
