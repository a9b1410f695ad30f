"""The tree descriptor: one object that drafting, verification, selection and publication read.

Row 0 is the pending token. Every other row is a draft token whose parent row precedes it.
Autoregressive decoding is the root-only tree, an MTP-k chain is a path, hydra27 is the
deployed tree of the LumoTree paper (arXiv 2609.23900). Plain Python: no torch in here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from lumotree.errors import LumoTreeError

# The last key block and the tree's own keys are summed by one BLAS chain, which holds 384 or 192
# terms: 255 + 128 and 63 + 128 fit (KEY_BLOCK in ops/reference.py).
MAX_ROWS = 128


@dataclass(frozen=True)
class SchedulePath:
    """A run of rows that one scan program walks: `rows[0]`'s parent state comes from `parent`.

    `parent` is the row whose state starts the path, -1 for the pre-tree state. A path of
    level n starts from a state that a path of level n - 1 exported.
    """

    level: int
    parent: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class TreeDescriptor:
    """Shape of one verification step. Tokens are not part of it: shapes repeat, tokens do not.

    parents: parent row of each row, -1 for row 0; parents precede their children.
    default_active: rows that may carry a draft; an inactive row is never read by another row.
    """

    name: str = field(compare=False)
    parents: tuple[int, ...]
    default_active: tuple[bool, ...]

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def depth(self) -> tuple[int, ...]:
        """Edges between each row and the root; row i sits at position m + depth[i]."""
        depth: list[int] = []
        for parent in self.parents:
            depth.append(0 if parent < 0 else depth[parent] + 1)
        return tuple(depth)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.parents]
        for row, parent in enumerate(self.parents):
            if parent >= 0:
                found[parent].append(row)
        return tuple(tuple(rows) for rows in found)

    @cached_property
    def root_paths(self) -> tuple[tuple[int, ...], ...]:
        """Rows from the root to each row, both included: what the row may see of the tree."""
        paths: list[tuple[int, ...]] = []
        for row, parent in enumerate(self.parents):
            paths.append((row,) if parent < 0 else (*paths[parent], row))
        return tuple(paths)

    @cached_property
    def drafts_above(self) -> tuple[tuple[int, ...], ...]:
        """`root_paths` without the root, each padded with -1 to the length of the longest."""
        deepest = max(self.depth)
        return tuple((*p[1:], *(-1,) * (deepest - len(p) + 1)) for p in self.root_paths)

    @cached_property
    def height(self) -> tuple[int, ...]:
        """Edges between each row and the deepest row below it."""
        height = [0] * len(self)
        for row in range(len(self) - 1, 0, -1):
            parent = self.parents[row]
            height[parent] = max(height[parent], height[row] + 1)
        return tuple(height)

    @cached_property
    def heavy_child(self) -> tuple[int, ...]:
        """The child with the deepest subtree (ties to the lowest row), -1 for a leaf."""
        return tuple(
            max(rows, key=lambda row: (self.height[row], -row)) if rows else -1
            for rows in self.children
        )

    @cached_property
    def spine(self) -> tuple[int, ...]:
        """The heavy path from the root to its leaf: the principal path of the tree."""
        rows = [0]
        while (child := self.heavy_child[rows[-1]]) >= 0:
            rows.append(child)
        return tuple(rows)

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """Row -> KV slot after the prefix, spine first.

        An accepted spine prefix then already lies where a linear cache wants it. Every row's
        ancestors keep smaller slots, so path order is slot order.
        """
        order = [*self.spine, *sorted(set(range(len(self))) - set(self.spine))]
        slots = [0] * len(self)
        for slot, row in enumerate(order):
            slots[row] = slot
        return tuple(slots)

    @cached_property
    def schedule(self) -> tuple[SchedulePath, ...]:
        """Heavy-path decomposition, by level and then by falling length.

        A heavy path is cut after its last branching row, so that every state another path
        starts from is exported by an earlier level.
        """
        paths: list[SchedulePath] = []
        todo = [(0, -1, 0)]
        while todo:
            start, parent, level = todo.pop()
            rows = [start]
            while (child := self.heavy_child[rows[-1]]) >= 0:
                rows.append(child)
            branching = [i for i, row in enumerate(rows) if len(self.children[row]) > 1]
            kept = rows[: branching[-1] + 1] if branching else rows
            paths.append(SchedulePath(level, parent, tuple(kept)))
            in_path = set(kept)
            todo += [
                (child, row, level + 1)
                for row in kept
                for child in self.children[row]
                if child not in in_path
            ]
        return tuple(sorted(paths, key=lambda p: (p.level, -len(p.rows), p.rows[0])))

    @lru_cache(maxsize=256)  # noqa: B019 - descriptors are few and live as long as the decoder
    def restrict(self, active: tuple[bool, ...]) -> tuple[TreeDescriptor, tuple[int, ...]]:
        """The tree of the active rows alone, and the old row of each of its rows.

        Raises ValueError when an active row hangs below an inactive one.
        """
        kept = tuple(row for row, on in enumerate(active) if on)
        new_row = {row: i for i, row in enumerate(kept)}
        if 0 not in new_row or any(self.parents[r] not in new_row for r in kept[1:]):
            raise ValueError(f"active rows {kept} of {self.name} are not closed under parent")
        parents = (-1, *(new_row[self.parents[row]] for row in kept[1:]))
        return TreeDescriptor(self.name, parents, (True,) * len(kept)), kept

    def check(self) -> None:
        """Parents precede children, slots are a bijection in path order, rows are scheduled once.

        Raises LumoTreeError naming the first row that breaks a rule.
        """
        if not self.parents or self.parents[0] != -1:
            raise LumoTreeError(f"tree {self.name}: row 0 must be the root (parent -1)")
        if len(self) > MAX_ROWS:
            raise LumoTreeError(f"tree {self.name} has {len(self)} rows; at most {MAX_ROWS}")
        for row, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < row:
                raise LumoTreeError(
                    f"tree {self.name}: row {row} has parent {parent}",
                    "parents are earlier rows; only row 0 has none",
                )
            if self.default_active[row] and not self.default_active[parent]:
                raise LumoTreeError(
                    f"tree {self.name}: active row {row} hangs below an inactive row"
                )
        for row, parent in enumerate(self.parents[1:], start=1):
            if self.slots[parent] >= self.slots[row]:
                raise LumoTreeError(f"tree {self.name}: slot of row {row} precedes its parent's")
        if not all(self.default_active[row] for row in self.spine):
            raise LumoTreeError(f"tree {self.name}: its deepest path has an inactive row")
        if sorted(self.slots) != list(range(len(self))):
            raise LumoTreeError(f"tree {self.name}: slots are not a permutation")
        if sorted(row for path in self.schedule for row in path.rows) != list(range(len(self))):
            raise LumoTreeError(f"tree {self.name}: the schedule does not visit every row once")


HYDRA27_PARENTS = (
    *(-1, 0, 0, 0, 1, 1, 1, 2, 3, 4, 4, 4, 7, 8, 9, 9),
    *(9, 12, 13, 14, 14, 14, 17, 18, 19, 23, 24, 25, 26, 28, 29, 30),
)
HYDRA27_INACTIVE = (18, 23, 25, 27)


@lru_cache(maxsize=64)
def tree_from_name(name: str) -> TreeDescriptor:
    """The descriptor of a preset (`root`, `chain-K`, `hydra27`) or a list of parents `-1,0,0,1`.

    Raises LumoTreeError when the name is neither, or the list is no tree.
    """
    inactive: Sequence[int] = ()
    if name == "root":
        parents: tuple[int, ...] = (-1,)
    elif match := re.fullmatch(r"chain-(\d{1,3})", name):
        parents = tuple(range(-1, int(match[1])))
    elif name == "hydra27":
        parents, inactive = HYDRA27_PARENTS, HYDRA27_INACTIVE
    elif re.fullmatch(r"-1(,\d{1,3})*", name):
        parents = tuple(int(part) for part in name.split(","))
    else:
        raise LumoTreeError(
            f"unknown tree {name!r}",
            "use root, chain-K, hydra27 or a list of parents such as -1,0,0,1",
        )
    active = tuple(row not in inactive for row in range(len(parents)))
    tree = TreeDescriptor(name, parents, active)
    tree.check()
    return tree
