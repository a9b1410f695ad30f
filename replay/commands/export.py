"""`lumotree export`: a run for people and for other tools."""

from __future__ import annotations

from pathlib import Path

import typer


def register(app: typer.Typer) -> None:
    app.command("export", epilog="Example: lumotree export runs/20260101-120000-first")(export)


def export(
    run: Path = typer.Argument(..., help="Run folder."),
    format: str = typer.Option(
        "md", help="md (the report's tables), csv or parquet (requests, arms, comparisons)."
    ),
    out: Path = typer.Option(None, help="Folder to write into. Default: the run folder."),
    as_json: bool = typer.Option(False, "--json", help="Print the paths as JSON."),
) -> None:
    """Write a run as Markdown, CSV or Parquet, from its saved files."""
    from replay.export import export_run
    from replay.talk import print_json

    paths = [str(path) for path in export_run(run, format, out)]
    if as_json:
        print_json({"files": paths})
    else:
        print("\n".join(paths))
