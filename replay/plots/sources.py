"""Who proposed the tokens that were accepted."""

from __future__ import annotations

from typing import Any

from lumotree.request import SOURCES
from replay.plots.style import INK, SOURCE_FILL, bar_axes, note
from replay.report.view import RunView

TITLE = "Tokens per step, by who proposed them"
TEXT = (
    "Every step emits the target's own token; the rest are accepted drafts: of the draft head's "
    "first choice (spine), of its runner-ups, and of text copied from the request (suffix on the "
    "spine, rescue under a runner-up). What a stop or the cap cut off is still counted here."
)


# What came from the target alone, then who drafted.
KINDS = ("target", *SOURCES)


def draw(view: RunView) -> Any | None:
    arms = [arm for arm in view.arms.values() if arm.steps and arm.number("tokens_per_step")]
    if not any(arm.accepted_by_source for arm in arms):
        return None
    figure, axes = bar_axes(TITLE, view.caption, [arm.name for arm in arms], extra=0.7)
    left = [0.0] * len(arms)
    for source in KINDS:
        fill, hatch = SOURCE_FILL[source]
        widths = [
            1.0 if source == "target" else arm.accepted_by_source.get(source, 0) / arm.steps
            for arm in arms
        ]
        if not any(widths):
            continue
        axes.barh(
            range(len(arms)), widths, left=left, height=0.62, label=source, color=fill,
            hatch=hatch, edgecolor=INK, linewidth=0.7,
        )  # fmt: skip
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, end in enumerate(left):
        note(axes, f"{end:.2f}", end, row)
    axes.set_xlim(0, max(left) * 1.12)
    axes.set_xlabel("tokens per step", fontsize=9)
    axes.legend(
        loc="upper left", ncols=5, frameon=False, fontsize=9, borderaxespad=0,
        handlelength=2.2, handleheight=1.1,
    )  # fmt: skip
    return figure
