"""`lumotree report`: the HTML report and the pictures of a run, from its saved files."""

from __future__ import annotations

from pathlib import Path

import typer


def register(app: typer.Typer) -> None:
    app.command("report", epilog="Example: lumotree report runs/20260101-120000-first")(report)


def report(
    run: Path = typer.Argument(..., help="Folder of a replay or of an agent study."),
    out: Path = typer.Option(None, help="Where the report goes. Default: into the run folder."),
    as_json: bool = typer.Option(False, "--json", help="Print the path as JSON."),
) -> None:
    """Write report.html and the pictures again. Nothing is measured and no model is loaded."""
    from replay.agent.store import StudyFolder
    from replay.report.page import write_report
    from replay.report.study import write_study_report
    from replay.talk import print_json

    write = write_study_report if StudyFolder.is_study(run) else write_report
    path = write(run, out)
    if as_json:
        print_json({"report": str(path)})
    else:
        print(path)
