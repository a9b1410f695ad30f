"""Pooled decode rates: one bar per arm, one dot per run."""

from __future__ import annotations

from typing import Any

from replay.plots.style import BLUE, INK, PALE, SOFT, bar_axes, note
from replay.report.view import RunView

TITLE = "Decode rate"
TEXT = (
    "Pooled decode rate of each arm: all tokens after the first, over all decode time. "
    "Dots are single runs, the whisker spans them. The fastest arm is dark; "
    "a rate that a guard withholds is not drawn."
)


def draw(view: RunView) -> Any | None:
    arms = view.measured
    if not arms:
        return None
    figure, axes = bar_axes(TITLE, view.caption, [arm.name for arm in arms])
    end = 0.0
    for row, arm in enumerate(arms):
        rate = arm.rate or 0.0
        if arm.withheld:  # neither a figure nor a length to read one from
            note(axes, "withheld by a guard", 0, row, style="italic", color=SOFT)
            continue
        best = view.winner is not None and arm.name == view.winner.name
        runs = list(arm.run_rates.values())
        spread = runs or list(arm.entry.get("run_range_tok_s") or ()) or [rate]
        colour = BLUE if best else PALE
        axes.barh(row, rate, height=0.62, color=colour, edgecolor=INK, linewidth=0.8)
        high = max(rate, *spread)
        axes.plot([min(spread), max(spread)], [row, row], color=INK, linewidth=1.1)
        axes.plot(runs, [row] * len(runs), "o", mfc="white", mec=INK, ms=5, mew=1.0)
        note(axes, f"{rate:.1f} tok/s", high, row, fontweight="bold" if best else "normal")
        end = max(end, high * 1.2)
    axes.set_xlim(0, end or 1)
    axes.set_xlabel("tokens per second", fontsize=9)
    return figure
