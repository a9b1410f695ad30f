"""Where the milliseconds of a step go."""

from __future__ import annotations

from typing import Any

from lumotree.request import PHASES
from replay.plots.style import INK, PHASE_FILL, bar_axes, note
from replay.report.view import RunView

TITLE = "Milliseconds per step, by phase"
TEXT = (
    "Wall-clock time of an average step, by phase. A step pays for itself when it emits more "
    "tokens than it costs extra time."
)


def draw(view: RunView) -> Any | None:
    arms = [arm for arm in view.measured if arm.phases]
    if not arms:
        return None
    figure, axes = bar_axes(TITLE, view.caption, [arm.name for arm in arms], extra=0.7)
    left = [0.0] * len(arms)
    for phase in PHASES:
        fill, hatch = PHASE_FILL[phase]
        widths = [arm.phases[phase] for arm in arms]
        axes.barh(
            range(len(arms)), widths, left=left, height=0.62, label=phase, color=fill,
            hatch=hatch, edgecolor=INK, linewidth=0.7,
        )  # fmt: skip
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, (arm, end) in enumerate(zip(arms, left, strict=True)):
        tokens = arm.number("tokens_per_step")
        note(
            axes,
            f"{end:.1f} ms" + ("" if tokens is None else f" · {tokens:.2f} tokens"),
            end,
            row,
        )
    axes.set_xlim(0, 1.32 * max(left))
    axes.set_xlabel("milliseconds per step", fontsize=9)
    axes.legend(
        loc="upper left", ncols=len(PHASES), frameon=False, fontsize=9, borderaxespad=0,
        handlelength=2.2, handleheight=1.1,
    )  # fmt: skip
    return figure
