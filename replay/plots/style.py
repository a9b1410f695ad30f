"""How pictures look: one palette, one figure maker, labels that keep out of each other's way.

Colours are Okabe and Ito's, told apart with any colour vision; a hatch, a marker or a word always
says the same, so that a black-and-white print loses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

INK = "#1b1f24"
SOFT = "#5c636b"
GRID = "#e3e5e8"
BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
VERMILLION, PURPLE, YELLOW, PALE = "#D55E00", "#CC79A7", "#F0E442", "#d3d8de"

# Tints of the palette for large areas, so that a dark hatch shows on each of them.
PHASE_FILL = {
    "draft": ("#9ad2f2", "///"),
    "verify": ("#f3cd84", ""),
    "select": ("#74c4ad", "..."),
    "publish": ("#e2b3cd", "\\\\\\"),
    "other": ("#eceef0", "xxx"),
}
SOURCE_FILL = {
    "target": ("#eceef0", ""),
    "spine": ("#9ad2f2", ""),
    "runner-up": ("#f3cd84", "///"),
    "suffix": ("#74c4ad", "..."),
    "rescue": ("#e2b3cd", "xxx"),
}
ARM_COLOURS = (INK, ORANGE, BLUE, GREEN, VERMILLION, PURPLE, SKY, SOFT)
ARM_MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")
ARM_LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), "-")


def arm_style(names: Sequence[str], name: str) -> dict[str, Any]:
    """Colour, marker and line of an arm: by its place in the run, the same in every picture."""
    index = list(names).index(name)
    return {
        "color": ARM_COLOURS[index % len(ARM_COLOURS)],
        "marker": ARM_MARKERS[index % len(ARM_MARKERS)],
        "linestyle": ARM_LINES[index % len(ARM_LINES)],
    }


def new_figure(title: str, caption: str, height: float, width: float = 8.0) -> tuple[Any, Any]:
    """A figure with one pair of axes, a title and the line that says what was measured where."""
    # The object interface: no global pyplot state, no display needed.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=144, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    # The head takes 0.55 inches at the left edge, whatever the axes below need for their labels.
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - 0.55 / height))
    left = 0.1 / width
    figure.text(left, 1 - 0.1 / height, title, fontsize=12, fontweight="bold", color=INK, va="top")
    figure.text(left, 1 - 0.36 / height, caption, fontsize=8, color=SOFT, va="top")
    axes = figure.add_subplot()
    axes.title.set_horizontalalignment("left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    axes.tick_params(colors=INK, labelsize=9, length=3)
    axes.set_axisbelow(True)
    return figure, axes


def bar_axes(title: str, caption: str, names: Sequence[str], extra: float = 0) -> tuple[Any, Any]:
    """Axes for one horizontal bar per arm, first arm on top; heights fit any number of arms."""
    figure, axes = new_figure(title, caption, 1.15 + 0.42 * (len(names) + extra))
    axes.set_yticks(range(len(names)), [shorten(name) for name in names])
    axes.set_ylim(len(names) - 0.45, -0.55 - extra)
    axes.grid(axis="x", color=GRID)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    return figure, axes


def note(axes: Any, text: str, x: float, y: float, **options: Any) -> None:
    """A few words to the right of a mark."""
    options = {"xytext": (8, 0), "fontsize": 9, "color": INK, "va": "center"} | options
    axes.annotate(text, (x, y), textcoords="offset points", **options)


def shorten(name: str, width: int = 30) -> str:
    """Arm specs may be long; a label keeps the start and the end."""
    return name if len(name) <= width else f"{name[: width - 12]}…{name[-11:]}"


def place_labels(axes: Any, points: Sequence[tuple[float, float]], texts: Sequence[str]) -> None:
    """Put a label beside each point, where it covers neither another label nor a point."""
    from matplotlib.patheffects import withStroke

    halo = [withStroke(linewidth=3, foreground="white")]
    figure = axes.figure
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    taken = [_around(axes.transData.transform(point), 7 * figure.dpi / 72) for point in points]
    frame = axes.get_window_extent(renderer)
    places = ((9, 0, "left"), (-9, 0, "right"), (0, 11, "center"), (0, -11, "center"))
    places += ((9, 11, "left"), (9, -11, "left"), (-9, 11, "right"), (-9, -11, "right"))
    places += ((9, 24, "left"), (-9, 24, "right"), (9, -24, "left"), (-9, -24, "right"))
    for index, (point, text) in enumerate(zip(points, texts, strict=True)):
        for dx, dy, side in places:
            label = axes.annotate(
                text, point, (dx, dy), textcoords="offset points", ha=side, va="center",
                fontsize=9, color=INK, annotation_clip=False, path_effects=halo,
            )  # fmt: skip
            box = label.get_window_extent(renderer)
            others = [other for place, other in enumerate(taken) if place != index]
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 < box.y1
            if inside and box.y1 <= frame.y1 and not any(box.overlaps(other) for other in others):
                break
            label.remove()
        else:  # nowhere is free: to the right, whatever it covers
            note(axes, text, *point)
            continue
        taken.append(box)


def _around(centre: Any, reach: float) -> Any:
    from matplotlib.transforms import Bbox

    x, y = centre
    return Bbox([[x - reach, y - reach], [x + reach, y + reach]])
