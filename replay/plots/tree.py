"""The draft tree of an arm, with how often each node was on the accepted path."""

from __future__ import annotations

from typing import Any

from lumotree.tree import TreeDescriptor
from replay.plots.style import INK, SOFT, new_figure
from replay.report.arm import ArmView
from replay.report.view import RunView

TITLE = "Acceptance by tree node"
TEXT = (
    "The tree of one arm, root on the left. The number in a node is the share of steps, in per "
    "cent, whose accepted path went through it, and so is its shade; square nodes are the spine, "
    "dashed ones never carry a draft."
)
SHADES = ("#ffffff", "#9fcbe8", "#0072B2", "#08344f")


def draw(view: RunView) -> Any | None:
    arm = chosen(view)
    if arm is None or arm.tree is None:
        return None
    tree = arm.tree
    steps = arm.accepted_by_row[0]
    shares = [count / steps for count in arm.accepted_by_row]
    places = layout(tree)
    breadth = max(y for _, y in places) + 1
    figure, axes = new_figure(
        f"{TITLE}: {arm.name}",
        f"{view.caption} · {steps:,} steps",
        max(2.6, 1.3 + 0.36 * breadth),
        max(8.0, 2.0 + 0.62 * (max(tree.depth) + 1)),
    )
    spine = set(tree.spine)
    for row, parent in enumerate(tree.parents):
        if parent >= 0:
            (x0, y0), (x1, y1) = places[parent], places[row]
            off = not tree.default_active[row]
            axes.plot(
                [x0, x0 + 0.45, x1 - 0.45, x1],
                [y0, y1, y1, y1],
                color=SOFT if off else INK,
                linewidth=0.6 + 5 * shares[row],
                linestyle=":" if off else "-",
                solid_capstyle="round",
                zorder=1,
            )
    for row, (x, y) in enumerate(places):
        _node(axes, x, y, shares[row], row in spine, tree.default_active[row])
    axes.set_xlim(-0.6, max(tree.depth) + 0.6)
    axes.set_ylim(breadth - 0.3, -0.7)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xticks(range(max(tree.depth) + 1))
    axes.set_xlabel("depth in drafted tokens", fontsize=9)
    return figure


def chosen(view: RunView) -> ArmView | None:
    """The arm to draw: the fastest with a branching tree, else the fastest with any drafts."""
    arms = []
    for arm in view.measured:
        counts, tree = arm.accepted_by_row, arm.tree
        if tree is not None and len(tree) > 1 and len(counts) == len(tree) and counts[0]:
            arms.append(arm)
    branching = [arm for arm in arms if any(len(rows) > 1 for rows in arm.tree.children)]
    return max(branching or arms, key=lambda arm: arm.quoted or 0.0, default=None)


def layout(tree: TreeDescriptor) -> list[tuple[float, float]]:
    """Depth to the right; the spine on the first line, other heavy paths on lines below it."""
    lines: list[set[int]] = []  # columns in use on each line
    places: list[tuple[float, float]] = [(0.0, 0.0)] * len(tree)
    todo = [0]
    while todo:
        start = todo.pop(0)
        path = [start]
        while (child := tree.heavy_child[path[-1]]) >= 0:
            path.append(child)
        # The column before the first node is for its edge.
        columns = {tree.depth[row] for row in path} | {max(0, tree.depth[start] - 1)}
        above = 0 if start == 0 else int(places[tree.parents[start]][1]) + 1
        line = above
        while line < len(lines) and lines[line] & columns:
            line += 1
        lines += [set() for _ in range(line + 1 - len(lines))]
        lines[line] |= columns
        for row in path:
            places[row] = (float(tree.depth[row]), float(line))
        below = [child for row in reversed(path) for child in tree.children[row]]
        todo += [child for child in below if child not in path]
    return places


def _node(axes: Any, x: float, y: float, share: float, spine: bool, active: bool) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    shade = LinearSegmentedColormap.from_list("share", SHADES)
    marker, size = ("s", 20) if spine else ("o", 21)
    fill = shade(share) if active else "white"
    edge = INK if active else SOFT
    axes.plot(x, y, marker, ms=size, mfc=fill, mec=edge, mew=1.0, zorder=2)
    ink = "white" if active and share > 0.45 else edge
    axes.text(
        x, y, _percent(share) if active else "–", ha="center", va="center", fontsize=8, color=ink,
        zorder=3,
    )  # fmt: skip


def _percent(share: float) -> str:
    """Two figures at most, so that it fits a node; a node that never counted says 0."""
    percent = 100 * share
    if percent == 0 or percent >= 9.5:
        return f"{percent:.0f}"
    return f"{percent:.1f}" if percent >= 0.05 else "<.1"
