"""`lumotree compare`: paired comparisons of the arms of run folders, with intervals."""

from __future__ import annotations

from pathlib import Path

import typer

EPILOG = """Examples:

lumotree compare runs/20260101-120000-first

lumotree compare runs/20260101-120000-first --baseline mtp-5

lumotree compare runs/before runs/after"""


def register(app: typer.Typer) -> None:
    app.command("compare", epilog=EPILOG)(compare)


def compare(
    runs: list[Path] = typer.Argument(..., metavar="RUN [RUN]...", help="Run folders."),
    baseline: str = typer.Option(
        None, help="Arm of the first run that all others are held against. Default ar."
    ),
    force: bool = typer.Option(
        False, "--force", help="Compare runs that differ in corpus, model, sampling or cap."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the comparisons as JSON."),
) -> None:
    """Compare arms on the requests they share: 95 % intervals, wins, A/A floor, verdict.

    One run: its arms with the baseline. Several: each arm with its namesake in the first run.
    Runs that differ in corpus, model, sampling or cap are refused (exit code 2); with --force
    the table says what differs. An arm that a guard withholds has no ratio: exit code 1.
    """
    from replay.compare import compare_folders
    from replay.tables import console, print_comparison
    from replay.talk import print_json, say

    found = compare_folders(runs, baseline=baseline, force=force)
    if as_json:
        print_json(found)
    else:
        print_comparison(console(), found)
    for arm, reason in found["withheld"].items():
        say(f"withheld: {arm}: {reason}")
    if found["withheld"]:
        raise typer.Exit(1)
