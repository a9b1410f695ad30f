"""`lumotree breakeven`: cost against gain over tree sizes and depths on this machine."""

from __future__ import annotations

from pathlib import Path

import typer

EPILOG = """Examples:

lumotree breakeven corpora/first.jsonl

lumotree breakeven corpora/first.jsonl --out map.json

lumotree replay corpora/first.jsonl --arms "ar lumotree:tree=auto,plan=map.json\""""


def register(app: typer.Typer) -> None:
    app.command("breakeven", epilog=EPILOG)(breakeven)


def breakeven(
    corpus: Path = typer.Argument(..., help="JSONL corpus whose acceptance is measured."),
    model: str = typer.Option(
        "embedded",
        help="embedded, rehearsal:SHAPE, or a folder or hub id of a Hugging Face checkpoint.",
    ),
    dtype: str = typer.Option("auto", help="auto, float32 or bfloat16."),
    device: str = typer.Option("auto", help="auto, cpu or cuda."),
    rows: str = typer.Option("natural", help="natural or matched row counts."),
    threads: int = typer.Option(None, help="CPU threads; default: as torch chooses."),
    requests: int = typer.Option(4, min=1, help="Requests decoded to record acceptance."),
    tokens: int = typer.Option(64, min=8, help="Most tokens of each."),
    repeats: int = typer.Option(15, min=1, help="Timed steps per tree."),
    seed: int = typer.Option(0, min=0, help="Seed of the requests and of the random drafts."),
    out: Path = typer.Option(None, help="Write the JSON here; tree=auto,plan=FILE reads it."),
    as_json: bool = typer.Option(False, "--json", help="Print the JSON."),
    quiet: bool = typer.Option(False, "--quiet", help="No progress."),
) -> None:
    """Measure draft, verify and publish over trees and say where publishing eats the advantage.

    Chains of 1 to 11, the best parts of the deployed tree, and wide trees are timed with forced
    random drafts; tokens per step come from acceptance recorded on the corpus. From both follows
    the tree predicted to be fastest here.
    """
    from replay.study import break_even_study, write_study
    from replay.tables import console, print_breakeven
    from replay.talk import Bar, print_json, say

    with Bar(quiet) as bar:
        found = break_even_study(
            corpus,
            model=model,
            dtype=dtype,
            device=device,
            rows=rows,
            threads=threads,
            requests=requests,
            tokens=tokens,
            repeats=repeats,
            seed=seed,
            note=bar.note,
        )
    if out is not None:
        write_study(out, found)
    if as_json:
        print_json(found)
    else:
        print_breakeven(console(), found)
    if out is not None and not quiet:
        say(f"written: {out}")
