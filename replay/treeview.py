"""A tree descriptor as text and as JSON."""

from __future__ import annotations

from typing import Any

from lumotree.tree import TreeDescriptor


def draw(name: str, tree: TreeDescriptor) -> str:
    """Nodes under their parents, then the path schedule. `*` is the spine, `x` never drafted."""
    active = sum(tree.default_active)
    lines = [
        f"{name}: {len(tree)} rows, {active - 1} active drafts and the root, "
        f"depth {max(tree.depth)}",
        "",
        *_branch(tree, 0, "", ""),
        "",
        "row sN is KV slot N behind the prefix; * spine; x inactive",
        "",
        "path schedule",
    ]
    for path in tree.schedule:
        start = "the prefix" if path.parent < 0 else f"row {path.parent}"
        rows = " ".join(str(row) for row in path.rows)
        lines.append(f"  level {path.level}  from {start:<10}  {rows}")
    by_depth: dict[int, int] = {}
    for row, depth in enumerate(tree.depth):
        by_depth[depth] = by_depth.get(depth, 0) + tree.default_active[row]
    lines += ["", "active rows by depth: " + " ".join(str(by_depth[d]) for d in sorted(by_depth))]
    return "\n".join(lines)


def as_dict(name: str, tree: TreeDescriptor) -> dict[str, Any]:
    """The descriptor for machines; lists are indexed by row."""
    return {
        "name": name,
        "rows": len(tree),
        "parents": list(tree.parents),
        "depth": list(tree.depth),
        "active": list(tree.default_active),
        "slots": list(tree.slots),
        "spine": list(tree.spine),
        "schedule": [
            {"level": path.level, "parent": path.parent, "rows": list(path.rows)}
            for path in tree.schedule
        ],
    }


def _branch(tree: TreeDescriptor, row: int, lead: str, below: str) -> list[str]:
    mark = "*" if row in tree.spine else ""
    off = "" if tree.default_active[row] else " x"
    lines = [f"{lead}{row}{mark} s{tree.slots[row]}{off}"]
    # A single child continues the line of its parent, so that deep chains stay flat.
    while len(tree.children[row]) == 1:
        row = tree.children[row][0]
        mark = "*" if row in tree.spine else ""
        off = "" if tree.default_active[row] else " x"
        lines[-1] += f" - {row}{mark} s{tree.slots[row]}{off}"
    children = tree.children[row]
    for child in children:
        last = child == children[-1]
        lines += _branch(
            tree,
            child,
            f"{below}{'`- ' if last else '|- '}",
            f"{below}{'   ' if last else '|  '}",
        )
    return lines
