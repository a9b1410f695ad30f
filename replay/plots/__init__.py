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

    `run` may also be the JSON file of `lumotree breakeven`. Raises CorpusError when it is
    neither that nor a finished run folder with a rate.
    """
    from replay.report.view import RunView

    if run.is_file():
        return [draw_breakeven(run, out or run.parent)]
    view = RunView.load(run)
    if not view.measured:
        raise CorpusError(f"{run} holds no measured arm, so there is nothing to draw")
    return list(draw_view(view, out or run).values())


def draw_view(view: RunView, out: Path) -> dict[str, Path]:
    """The same for a run that is loaded already: picture name to path."""
    paths = {}
    for name in PICTURES:
        figure = picture(name).draw(view)
        if figure is not None:
            paths[name] = save(figure, out / f"{name}.png")
    return paths


def draw_breakeven(path: Path, out: Path) -> Path:
    """The picture of one break-even map, beside it or into `out`. Raises CorpusError."""
    breakeven = picture("breakeven")
    return save(breakeven.draw_map(breakeven.load_map(path)), out / f"{path.stem}.png")


def save(figure: Any, path: Path) -> Path:
    """Write one PNG; no date and no version inside, so that the same rows give the same bytes."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Software": None})
    except OSError as error:
        raise CorpusError(f"{path} cannot be written: {error.strerror}") from None
    return path
