"""Average steps as they pass: one lane per arm, for as long as the longest step lasts."""

from __future__ import annotations

from typing import Any

from lumotree.request import PHASES
from replay.plots.style import INK, PHASE_FILL, bar_axes, note
from replay.report.arm import ArmView
from replay.report.view import RunView

TITLE = "Timeline of a step"
TEXT = (
    "Average steps, one after the other, for as long as the longest of them lasts; phases in the "
    "order in which they run. A triangle stands where a step hands out its tokens; the number at "
    "the end counts what the lane has emitted by then."
)
# More steps than this on a lane are lines without room for phases.
MOST = 60


def draw(view: RunView) -> Any | None:
    arms = [arm for arm in view.measured if arm.phases and arm.number("tokens_per_step")]
    if not arms:
        return None
    longest = max(sum(arm.phases.values()) for arm in arms)
    figure, axes = bar_axes(TITLE, view.caption, [arm.name for arm in arms], extra=0.7)
    for row, arm in enumerate(arms):
        length = sum(arm.phases.values())
        # Whole steps only: a step that has not ended its selection has emitted nothing.
        steps = max(1, min(int(longest / length + 1e-9), MOST))
        for step in range(steps):
            _step(axes, arm, row, step * length, labelled=row == 0 and step == 0)
        emitted = steps * (arm.number("tokens_per_step") or 0)
        what = f"{steps} step{'s' if steps > 1 else ''}, {emitted:.1f} tokens"
        note(axes, what, max(longest, steps * length), row)
    axes.set_xlim(0, longest * 1.32)
    axes.set_xlabel("milliseconds", fontsize=9)
    axes.legend(
        loc="upper left", ncols=len(PHASES), frameon=False, fontsize=9, borderaxespad=0,
        handlelength=2.2, handleheight=1.1,
    )  # fmt: skip
    return figure


def _step(axes: Any, arm: ArmView, row: int, start: float, labelled: bool) -> None:
    at = start
    for phase in PHASES:
        fill, hatch = PHASE_FILL[phase]
        axes.barh(
            row, arm.phases[phase], left=at, height=0.46, color=fill, hatch=hatch, edgecolor=INK,
            linewidth=0.5, label=phase if labelled else None,
        )  # fmt: skip
        at += arm.phases[phase]
        if phase == "select":
            axes.plot(at, row - 0.32, "v", color=INK, ms=5, clip_on=False)
