"""Pictures of a run, one file per picture, from its saved files only.

A picture is a module with `TITLE`, `TEXT` (what it shows, also its text for those who cannot see
it) and `draw(view)`, which gives a figure, or None where the run holds nothing to draw.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lumotree.errors import CorpusError

if TYPE_CHECKING:
    from replay.report.view import RunView

# In the order in which a reader wants them; the name is the file's.
PICTURES = (
    "rates",
    "ratios",
    "efficiency",
    "phases",
    "timeline",
    "survival",
    "sources",
    "tree",
    "breakeven",
)


def picture(name: str) -> Any:
    """The module of a picture; matplotlib is only loaded when it draws."""
    return import_module(f"replay.plots.{name}")


def draw_run(run: Path, out: Path | None = None) -> list[Path]:
    """Write every picture the run has material for; return the paths.

    Raises CorpusError when `run` is no finished run folder or holds no rate.
    """
    from replay.report.view import RunView

    view = RunView.load(run)
    if not view.measured:
        raise CorpusError(f"{run} holds no measured arm, so there is nothing to draw")
    return list(draw_view(view, out or run).values())


def draw_view(view: RunView, out: Path) -> dict[str, Path]:
    """The same for a run that is loaded already: picture name to path."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CorpusError(f"{out} cannot be created: {error.strerror}") from None
    paths = {}
    for name in PICTURES:
        figure = picture(name).draw(view)
        if figure is not None:
            paths[name] = out / f"{name}.png"
            # No date and no version inside: the same rows give the same bytes.
            figure.savefig(paths[name], metadata={"Software": None})
    return paths
