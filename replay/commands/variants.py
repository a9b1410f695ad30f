"""`lumotree variants`: what each optimisation and each way to draft is worth on a corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

EPILOG = """Examples:

lumotree variants corpora/first.jsonl --set drafting --runs 1 --limit 6

lumotree variants corpora/first.jsonl --model rehearsal:27b

lumotree variants corpora/first.jsonl --arm lumotree --arm lumotree:draft_vocab=32768"""


def register(app: typer.Typer) -> None:
    app.command("variants", epilog=EPILOG)(variants)


def variants(
    corpus: str = typer.Argument(..., help="JSONL corpus."),
    sets: str = typer.Option(
        None,
        "--set",
        help="optimisations (attention=stock, selection=separate, operands=inline; needs a GPU) "
        "or drafting (3 passes, 3 then 5, no suffix drafts, draft weights in 8 bits, reduced "
        "draft vocabularies). Default: both on a GPU, drafting without one.",
    ),
    arm: list[str] = typer.Option(None, help="Arm specs in place of a set; may be repeated."),
    model: str = typer.Option("embedded", help="As `lumotree replay`."),
    dtype: str = typer.Option("auto", help="auto, float32 or bfloat16."),
    device: str = typer.Option("auto", help="auto, cpu or cuda."),
    rows: str = typer.Option("natural", help="natural or matched row counts."),
    threads: int = typer.Option(None, help="CPU threads; default: as torch chooses."),
    runs: int = typer.Option(3, min=1, help="Interleaved runs."),
    limit: int = typer.Option(None, min=1, help="Requests to take. Default all."),
    cap: int = typer.Option(1024, min=1, help="Most tokens per request."),
    seed: int = typer.Option(0, min=0, help="Seed of the requests."),
    out: Path = typer.Option(None, help="Run folder. Default runs/<time>-<corpus>."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as JSON."),
    quiet: bool = typer.Option(False, "--quiet", help="No progress and no talk."),
) -> None:
    """Replay a corpus through variants of the tree arm, interleaved, and print the tables of the
    paper's exploratory section with its columns beside ours.

    The run folder is one of `lumotree replay`: compare, plot and report read it.
    """
    from replay.commands.replay import run

    specs = tuple(arm) if arm else chosen(sets, model, device)
    given: dict[str, Any] = {
        "corpus": corpus,
        "arms": specs,
        "model": model,
        "dtype": dtype,
        "device": device,
        "rows": rows,
        "runs": runs,
        "cap": cap,
        "seed": seed,
    }
    given |= {"threads": threads} if threads is not None else {}
    given |= {"limit": limit} if limit is not None else {}
    outcome = run(given, out=out, as_json=as_json, quiet=quiet)
    if not as_json:
        print_tables(outcome.folder.path)
    if not outcome.ok:
        raise typer.Exit(1)


def chosen(name: str | None, model: str, device: str) -> tuple[str, ...]:
    """The specs of a set, or of all sets that this device can run."""
    import torch

    from lumotree.model.source import open_source
    from replay.variants import SETS, variant_set

    gpu = device != "cpu" and torch.cuda.is_available()
    eight_bits = not gpu or torch.cuda.get_device_capability() >= (8, 9)
    names = [name] if name is not None else [s for s in SETS if gpu or s == "drafting"]
    vocab = open_source(model).config.vocab_size
    specs = [spec for one in names for spec in variant_set(one, vocab, eight_bits)]
    return tuple(dict.fromkeys(specs))


def print_tables(folder: Path) -> None:
    from replay.paper_tables import TABLES
    from replay.report.view import RunView
    from replay.tables import console, paper_table

    view = RunView.load(folder)
    for name in ("phases", "drafting"):
        console().print(paper_table(TABLES[name](view)))
