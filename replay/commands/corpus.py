"""`lumotree corpus`: look at a corpus, check it, make one, choose from one, hand one on."""

from __future__ import annotations

from pathlib import Path

import typer

app = typer.Typer(
    no_args_is_help=True,
    help="Look at corpora; import, export and select them.",
    rich_markup_mode=None,
)


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


@app.command("import", epilog="Example: lumotree corpus import trace.jsonl --out mine.jsonl")
def import_(
    file: Path = typer.Argument(..., help="What another tool recorded."),
    out: Path = typer.Option(..., help="The corpus to write; its manifest goes beside it."),
    format: str = typer.Option(
        None,
        help="batch, body, mooncake, sharegpt, mini-swe-agent, aiperf or har. "
        "Default: told by the first record.",
    ),
    force: bool = typer.Option(False, "--force", help="Replace files that exist."),
    as_json: bool = typer.Option(False, "--json", help="Print what was imported as JSON."),
) -> None:
    """Turn another tool's recording into a corpus.

    Reads OpenAI batch lines, bare bodies, Mooncake traces with messages or payload, ShareGPT,
    mini-swe-agent trajectories, AIPerf inputs.json and HAR. Traces of lengths and hashes have no
    text and are refused.

    Dropped with their values: keys that end in headers, authorization, cookie(s), api-key, token,
    secret, password, access-key, secret-key, private-key or credentials, whatever their case and
    punctuation (not eos_token and the like, nor numbers called token), openai-organization and
    openai-project. Messages, function definitions, logprobs and the properties of JSON schemas stay
    as they are, so a secret in a message, a text or an address stays too.
    """
    from replay.formats.reading import read_foreign
    from replay.formats.writing import write_corpus
    from replay.talk import print_json

    found = read_foreign(file, format)
    sha256 = write_corpus(found.lines, out, {"imported_from": found.format}, force)
    names = {line["lumotree"]["conversation"] for line in found.lines}
    if as_json:
        print_json(
            {
                "corpus": str(out),
                "format": found.format,
                "requests": len(found.lines),
                "conversations": len(names),
                "sha256": sha256,
            }
        )
    else:
        print(
            f"{out}: {len(found.lines)} requests in {len(names)} conversations, "
            f"from {file.name} ({found.format})"
        )


@app.command(
    "export",
    epilog="Example: lumotree corpus export mine.jsonl --format body --out b.jsonl",
)
def export(
    corpus: Path = typer.Argument(..., help="JSONL corpus."),
    out: Path = typer.Option(..., help="The file to write."),
    format: str = typer.Option(
        "batch", help="batch (OpenAI), body (AIPerf raw, SGLang openai), aiperf or mooncake."
    ),
    force: bool = typer.Option(False, "--force", help="Replace a file that exists."),
    as_json: bool = typer.Option(False, "--json", help="Print what was exported as JSON."),
) -> None:
    """Write a corpus for another tool.

    What only LumoTree knows is stripped, and keys that name credentials as in corpus import.
    """
    from replay.corpus import load_corpus
    from replay.formats.writing import export_corpus
    from replay.talk import print_json

    read = load_corpus(corpus)
    export_corpus(read, format, out, force)
    if as_json:
        print_json({"file": str(out), "format": format, "requests": len(read.requests)})
    else:
        print(f"{out}: {len(read.requests)} requests ({format})")


@app.command(
    "select",
    epilog="Example: lumotree corpus select all.jsonl --rule proportional --n 43 --out mine.jsonl",
)
def select(
    corpus: Path = typer.Argument(..., help="JSONL corpus."),
    n: int = typer.Option(..., "--n", help="How many requests."),
    out: Path = typer.Option(..., help="The corpus to write; its manifest goes beside it."),
    rule: str = typer.Option(
        "proportional",
        help="proportional: each conversation its share, evenly spaced; even: evenly spaced over "
        "all; first: the first ones.",
    ),
    force: bool = typer.Option(False, "--force", help="Replace files that exist."),
    as_json: bool = typer.Option(False, "--json", help="Print what was chosen as JSON."),
) -> None:
    """Choose requests of a corpus by a rule, before anything is run, and freeze the choice.

    Lines are copied byte for byte: nothing is dropped from them.
    """
    from replay.corpus import load_corpus
    from replay.formats.choosing import select_corpus
    from replay.talk import print_json

    read = load_corpus(corpus)
    chosen, sha256 = select_corpus(read, rule, n, out, force)
    if as_json:
        print_json(
            {
                "corpus": str(out),
                "rule": rule,
                "requests": len(chosen),
                "selected_from": len(read.requests),
                "sha256": sha256,
            }
        )
    else:
        print(f"{out}: {len(chosen)} of {len(read.requests)} requests ({rule})")
