"""Paired ratios with their intervals, against the floor that repeating an arm gives."""

from __future__ import annotations

import math
from typing import Any

from replay.plots.style import BLUE, GRID, INK, PALE, SOFT, VERMILLION, bar_axes, shorten
from replay.report.view import RunView
from replay.report.words import floor_of, verdict_of

TITLE = "Speed against the baseline"
TEXT = (
    "Ratio of pooled rates over the same requests, with its 95 % interval. The grey band is the "
    "A/A floor: how far apart two runs of one arm come on this machine. A filled mark is "
    "separated from 1, a hollow one is not."
)
TICKS = (0.1, 0.125, 0.25, 0.33, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16)


def draw(view: RunView) -> Any | None:
    entries = view.comparisons
    if not any(entry.get("ratio") for entry in entries):
        return None
    several = len({entry["baseline"] for entry in entries}) > 1
    names = [
        f"{shorten(e['arm'])} / {shorten(e['baseline'])}" if several else e["arm"] for e in entries
    ]
    figure, axes = bar_axes(TITLE, view.caption, names)
    low, high = 1.0, 1.0
    for row, entry in enumerate(entries):
        floor = floor_of(entry)
        if floor is not None:
            axes.fill_betweenx(
                [row - 0.38, row + 0.38], floor[0], floor[1], color=PALE, linewidth=0
            )
            low, high = min(low, floor[0]), max(high, floor[1])
        ratio, left, right = entry.get("ratio"), entry.get("ci_low"), entry.get("ci_high")
        verdict = verdict_of(view, entry)
        if verdict == "withheld" or ratio is None:
            _beside(axes, row, "withheld")
            continue
        colour = {"faster": BLUE, "slower": VERMILLION}.get(verdict, SOFT)
        text = f"{ratio:.2f}×"
        if left is not None and right is not None:
            axes.plot([left, right], [row, row], color=colour, linewidth=2.2)
            axes.plot([left, right], [row, row], "|", color=colour, ms=9, mew=2)
            text += f"  [{left:.2f}, {right:.2f}]"
            low, high = min(low, left), max(high, right)
        separated = verdict in ("faster", "slower")
        axes.plot(ratio, row, "o", color=colour, mfc=colour if separated else "white", ms=8, mew=2)
        low, high = min(low, ratio), max(high, ratio)
        _beside(axes, row, f"{text}   {verdict}")
    axes.axvline(1, color=INK, linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(low / 1.12, high * 1.12)
    ticks = _spread(low / 1.12, high * 1.12)
    axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="x", color=GRID)
    base = "the baseline" if several else entries[0]["baseline"]
    axes.set_xlabel(f"rate as a multiple of {base}, log scale", fontsize=9)
    return figure


def _beside(axes: Any, row: int, text: str) -> None:
    axes.annotate(
        text, (1.015, row), xycoords=("axes fraction", "data"), va="center", fontsize=9, color=INK,
        annotation_clip=False,
    )  # fmt: skip


def _spread(low: float, high: float) -> list[float]:
    """Ticks far enough apart for their labels; 1 is always among them."""
    apart = 0.075 * math.log(high / low)
    kept: list[float] = [1.0]
    for tick in (tick for tick in TICKS if low <= tick <= high):
        if all(abs(math.log(tick / other)) >= apart for other in kept):
            kept.append(tick)
    return kept
