"""Tokens per step against milliseconds per step: the two factors of a rate."""

from __future__ import annotations

import math
from typing import Any

from replay.plots.style import GRID, INK, SOFT, arm_style, new_figure, place_labels, shorten
from replay.report.view import RunView

TITLE = "Tokens per step against milliseconds per step"
TEXT = (
    "Each arm at what its step costs and what it emits. Along a dashed line the rate is the same; "
    "up and to the left is faster. An arm beats the baseline when it lies above the solid line. "
    "A hollow mark is an arm whose rate a guard withholds."
)
RATES = (1, 2, 5, 10, 20, 30, 50, 75, 100, 150, 200, 300, 500, 750, 1000, 1500, 2000, 5000)


def draw(view: RunView) -> Any | None:
    found = {
        arm.name: (arm.number("ms_per_step"), arm.number("tokens_per_step"))
        for arm in view.measured
    }
    points = {name: (ms, tokens) for name, (ms, tokens) in found.items() if ms and tokens}
    if not points:
        return None
    figure, axes = new_figure(TITLE, view.caption, 4.8)
    left, right = _span([ms for ms, _ in points.values()], 1.5)
    bottom, top = _span([tokens for _, tokens in points.values()], 1.3)
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _ticks(axes.xaxis, left, right)
    _ticks(axes.yaxis, bottom, top)
    for rate in RATES:
        _iso_rate(axes, rate, (left, right), (bottom, top))
    base = view.baseline
    if base is not None and base.name in points:
        ms, tokens = points[base.name]
        ends = [tokens / ms * left, tokens / ms * right]
        axes.plot([left, right], ends, color=INK, linewidth=1.1, zorder=1)
    for name, point in points.items():
        style = arm_style(list(view.arms), name) | {"linestyle": "none"}
        hollow = {"mfc": "white"} if view.arms[name].withheld else {"mec": "white"}
        axes.plot(*point, ms=10, mew=1.2, zorder=3, **style, **hollow)
    axes.set_xlabel("milliseconds per step (log)", fontsize=9)
    axes.set_ylabel("tokens per step (log)", fontsize=9)
    place_labels(axes, list(points.values()), [shorten(name) for name in points])
    return figure


def _iso_rate(axes: Any, rate: float, xs: tuple[float, float], ys: tuple[float, float]) -> None:
    """The line of one rate inside the frame, named where it leaves it."""
    start = max(xs[0], 1000 * ys[0] / rate)
    end = min(xs[1], 1000 * ys[1] / rate)
    if math.log(end / start) < 0.12 * math.log(xs[1] / xs[0]) if end > start else True:
        return
    ends = [rate * start / 1000, rate * end / 1000]
    axes.plot([start, end], ends, color=SOFT, lw=0.7, ls=(0, (6, 4)), zorder=0)
    at_top = end < xs[1]
    axes.annotate(
        f"{rate:g} tok/s" if not at_top else f"{rate:g}",
        (end, ends[1]),
        (0, 3) if at_top else (4, 0),
        textcoords="offset points",
        ha="center" if at_top else "left",
        va="bottom" if at_top else "center",
        fontsize=8,
        color=SOFT,
        annotation_clip=False,
    )


def _span(values: list[float], margin: float) -> tuple[float, float]:
    """Limits around values on a log scale, never thinner than a factor of two."""
    low, high = min(values) / margin, max(values) * margin
    if high / low < 2:
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(2), middle * math.sqrt(2)
    return low, high


def _ticks(axis: Any, low: float, high: float) -> None:
    marks = [
        m * 10**e
        for e in range(-2, 5)
        for m in (1, 1.5, 2, 3, 4, 5, 6, 8)
        if low <= m * 10**e <= high
    ]
    axis.set_ticks(marks, [f"{mark:g}" for mark in marks])
    axis.set_ticks([], minor=True)
    axis.grid(True, color=GRID, linewidth=0.6)
