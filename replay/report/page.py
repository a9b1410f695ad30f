"""The page: one HTML file that needs nothing else, written whole or not at all."""

from __future__ import annotations

import base64
from pathlib import Path

from replay import auditfile
from replay.metrics import ARM, COMPARISON, GUARDS
from replay.plots import PICTURES, draw_view, picture
from replay.report.about import about
from replay.report.audit import audit_tables
from replay.report.cells import Table
from replay.report.predictions import breakeven_table
from replay.report.requests import request_table
from replay.report.sections import tables
from replay.report.template import asset, render_page, write_page
from replay.report.view import RunView
from replay.report.words import floor_of, headline, warnings, why

NAME = "report.html"


def write_report(run: Path, out: Path | None = None) -> Path:
    """Draw the pictures and write report.html into `out`, by default the run folder itself.

    Reads saved files only. Raises CorpusError when `run` is no run folder with a summary.
    """
    view = RunView.load(run)
    out = out or run
    pictures = draw_view(view, out)
    return write_page(out / NAME, render(view, pictures))


def render(view: RunView, pictures: dict[str, Path]) -> str:
    """The page as text; `pictures` are PNG files by picture name."""
    found = tables(view)
    return render_page(
        "report.html.j2",
        view=view,
        day=str(view.run.get("started_at") or "")[:10],
        headline=headline(view.summary),
        why=why(view),
        figures=key_figures(view),
        warnings=warnings(view),
        tables=found,
        requests=request_table(view),
        failed=view.failed,
        about=about(view),
        formulas=[("Rates and steps", ARM), ("Comparisons", COMPARISON), ("Guards", GUARDS)],
        extra=extra_tables(view),
        pictures={
            name: {
                "src": "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode(),
                "title": picture(name).TITLE,
                "text": picture(name).TEXT,
            }
            for name, path in pictures.items()
            if name in PICTURES
        },
        script=asset("sort.js"),
    )


def key_figures(view: RunView) -> list[tuple[str, str, str]]:
    """The figures on top: value, unit, what it is."""
    best, base = view.winner, view.baseline
    if best is None:
        return []
    found = [(f"{best.quoted:.1f}", "tok/s", f"pooled rate of {best.name}")]
    entry = next((e for e in view.comparisons if e.get("arm") == best.name), None)
    if entry is not None and entry.get("ratio"):
        said = f"against {entry['baseline']}"
        if entry.get("ci_low") is not None and entry.get("ci_high") is not None:
            said += f", 95 % interval {entry['ci_low']:.2f} to {entry['ci_high']:.2f}"
        floor = floor_of(entry)
        if floor is not None:
            said += f"; same arm twice {floor[0]:.2f} to {floor[1]:.2f}"
        found.append((f"{entry['ratio']:.2f}", "×", said))
    for key, unit, text in (
        ("tokens_per_step", "tokens", "per step"),
        ("ms_per_step", "ms", "per step"),
    ):
        value = best.number(key)
        if value is not None:
            beside = base.number(key) if base is not None and base is not best else None
            compared = "" if beside is None else f"; {base.name} {beside:.2f}"
            found.append((f"{value:.2f}", unit, text + compared))
    return found


def extra_tables(view: RunView) -> list[Table]:
    """Tables of what was put beside the run: the break-even map of its machine, an audit."""
    found = []
    breakeven = picture("breakeven")
    path = view.path / breakeven.NAME
    if path.is_file():
        found.append(breakeven_table(breakeven.load_map(path)))
    path = view.path / auditfile.NAME
    if path.is_file():
        found += audit_tables(auditfile.load_audit(path))
    return found
