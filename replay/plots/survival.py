"""Survival of drafts: how often the accepted path is at least so deep."""

from __future__ import annotations

from typing import Any

from replay.plots.style import GRID, INK, arm_style, new_figure, shorten
from replay.report.view import RunView

TITLE = "Survival of drafts by depth"
TEXT = (
    "Share of steps whose accepted path reached each depth. One plus the sum over depths is the "
    "arm's tokens per step, but for what a stop or the cap cut off."
)


def draw(view: RunView) -> Any | None:
    arms = [arm for arm in view.arms.values() if arm.survival]
    if not arms:
        return None
    figure, axes = new_figure(TITLE, view.caption, 4.4)
    deepest = max(len(arm.survival) for arm in arms)
    for arm in arms:
        shares = [1.0, *arm.survival]
        axes.plot(
            range(len(shares)), [100 * share for share in shares], ms=6, linewidth=1.6, mec="white",
            mew=0.6, label=_label(arm), **arm_style(list(view.arms), arm.name),
        )  # fmt: skip
    axes.set_ylim(0, 104)
    axes.set_xlim(-0.15, deepest + 0.3)
    axes.set_xticks(range(deepest + 1))
    axes.set_xlabel("depth of the accepted path, in drafted tokens", fontsize=9)
    axes.set_ylabel("share of steps, %", fontsize=9)
    axes.grid(color=GRID)
    legend = axes.legend(
        loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9, handlelength=3.2
    )
    for text in legend.get_texts():
        text.set_color(INK)
    return figure


def _label(arm: Any) -> str:
    tokens = arm.number("tokens_per_step")
    name = shorten(arm.name, 24)
    return name if tokens is None else f"{name}\n{tokens:.2f} tokens a step"
