"""`lumotree corpus`: look at a corpus and check it."""

from __future__ import annotations

from pathlib import Path

import typer

app = typer.Typer(no_args_is_help=True, help="Look at corpora.", rich_markup_mode=None)


def register(parent: typer.Typer) -> None:
    parent.add_typer(app, name="corpus")


@app.command("inspect", epilog="Example: lumotree corpus inspect corpora/first.jsonl")
def inspect(
    corpus: Path = typer.Argument(..., help="JSONL corpus."),
    model: str = typer.Option(
        "embedded", help="Whose tokenizer counts prompt tokens: embedded, a folder or a hub id."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the figures as JSON."),
) -> None:
    """Say what a corpus holds: requests, conversations, tasks, tools and prompt lengths."""
    from replay.corpus import load_corpus
    from replay.inspection import inspect_corpus, lines
    from replay.talk import print_json

    figures = inspect_corpus(load_corpus(corpus), model)
    if as_json:
        print_json(figures)
    else:
        print("\n".join(lines(figures)))


@app.command("validate", epilog="Example: lumotree corpus validate corpora/first.jsonl")
def validate(
    corpus: Path = typer.Argument(..., help="JSONL corpus."),
    as_json: bool = typer.Option(False, "--json", help="Print the verdict as JSON."),
) -> None:
    """Check every line, and the count and SHA-256 of the manifest beside the file.

    A line that cannot be read is exit code 2; a file that is not what its manifest froze is 1.
    """
    from replay.corpus import manifest_fault, manifest_path, read_corpus
    from replay.talk import print_json, say

    read = read_corpus(corpus)
    fault = manifest_fault(read)
    manifest = manifest_path(corpus)
    has_manifest = manifest.exists()
    if as_json:
        print_json(
            {
                "corpus": str(corpus),
                "valid": fault is None,
                "fault": fault,
                "requests": len(read.requests),
                "sha256": read.sha256,
                "manifest": str(manifest) if has_manifest else None,
            }
        )
    elif fault is None:
        frozen = f"as frozen in {manifest.name}" if has_manifest else "it has no manifest"
        print(f"{corpus} is valid: {len(read.requests)} requests; {frozen}")
    if fault is not None:
        say(f"lumotree: {fault}")
        raise typer.Exit(1)
