"""`lumotree plot`: pictures of a run, from its saved files."""

from __future__ import annotations

from pathlib import Path

import typer


def register(app: typer.Typer) -> None:
    app.command("plot", epilog="Example: lumotree plot runs/20260101-120000-first")(plot)


def plot(
    run: Path = typer.Argument(..., help="Run folder, or the JSON of lumotree breakeven."),
    out: Path = typer.Option(None, help="Where the pictures go. Default: into the run folder."),
    as_json: bool = typer.Option(False, "--json", help="Print the paths as JSON."),
) -> None:
    """Draw the pictures of a run: rates, ratios, phases, survival, sources, tree and more.

    Only what was measured is drawn; the paths of the PNG files are printed.
    """
    from replay.plots import draw_run
    from replay.talk import print_json

    paths = [str(path) for path in draw_run(run, out)]
    if as_json:
        print_json({"pictures": paths})
    else:
        print("\n".join(paths))
