"""`lumotree audit`: shows that verification, publication and sampling are right, and that the
audits would see it if they were not."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

EPILOG = """Examples:

lumotree audit all --quick

lumotree audit continuation --model /models/Qwen3.5-4B --device cuda --faults

lumotree audit component --geometry 9b"""

app = typer.Typer(
    no_args_is_help=True,
    help="Audit tree verification, publication and sampling on this machine and model.",
    rich_markup_mode=None,
)

Model = typer.Option(
    "embedded", help="embedded, rehearsal:SHAPE, or a folder or hub id of a checkpoint."
)
Dtype = typer.Option("auto", help="auto, float32 or bfloat16.")
Device = typer.Option("auto", help="auto, cpu or cuda.")
Rows = typer.Option("natural", help="natural or matched: how rows are padded.")
Threads = typer.Option(
    None,
    help="CPU threads of a process; default: as torch chooses, half of it with a soak beside.",
)
Corpus = typer.Option("corpora/first.jsonl", help="Where prompts come from.")
Seed = typer.Option(0, help="Seed of operands, trees, paths and draws.")
Seeds = typer.Option(1, help="How many seeds from --seed on: counts false alarms.")
Quick = typer.Option(False, "--quick", help="Small sizes: under a minute on two cores.")
Faults = typer.Option(False, "--faults/--no-faults", help="Plant faults: each must be seen.")
Out = typer.Option(
    None,
    help="Folder for audit.json, constants.json and the report; a replay's folder takes the "
    "audit into its own report. Default runs/<time>-audit.",
)
Json = typer.Option(False, "--json", help="Print audit.json.")
Quiet = typer.Option(False, "--quiet", help="No progress and no talk.")


def register(parent: typer.Typer) -> None:
    parent.add_typer(app, name="audit")


@app.callback()
def root() -> None:
    pass


@app.command("component", epilog="Example: lumotree audit component --geometry 9b")
def component(
    geometry: str = typer.Option(
        None, help="27b (default; two of its layers on a processor), 9b, 4b, 2b, 0.8b or tiny."
    ),
    device: str = Device,
    threads: int = Threads,
    seed: int = Seed,
    seeds: int = Seeds,
    quick: bool = Quick,
    out: Path = Out,
    as_json: bool = Json,
    quiet: bool = Quiet,
) -> None:
    """GDN verifiers alone: native bits, errors against float64, repeats in fresh processes."""
    options = {"geometry": geometry, "device": device, "threads": threads}
    options |= {"seed": seed, "seeds": seeds, "quick": quick}
    _run(("component",), options, out, as_json, quiet)


def whole_model(audit: str, example: str, help: str) -> None:
    """Adds the command of one audit over a model; their options are the same."""

    @app.command(audit, epilog=f"Example: lumotree audit {example}", help=help)
    def command(
        model: str = Model,
        dtype: str = Dtype,
        device: str = Device,
        rows: str = Rows,
        threads: int = Threads,
        corpus: str = Corpus,
        seed: int = Seed,
        seeds: int = Seeds,
        quick: bool = Quick,
        faults: bool = Faults,
        out: Path = Out,
        as_json: bool = Json,
        quiet: bool = Quiet,
    ) -> None:
        _run((audit,), _options(locals()), out, as_json, quiet)


whole_model(
    "continuation",
    "continuation --faults",
    "The whole model over forced paths: every surface of the state, cycle by cycle.",
)
whole_model(
    "sampler",
    "sampler --seeds 20 --quick",
    "Output distribution: exact enumeration, captured steps, many walks, independent seeds.",
)
whole_model(
    "soak",
    "soak",
    "10,000 tokens over random trees and 500 requests in one slot, against plain decoding.",
)


@app.command("faults", epilog="Example: lumotree audit faults --seeds 10")
def faults_alone(
    model: str = Model,
    dtype: str = Dtype,
    device: str = Device,
    rows: str = Rows,
    threads: int = Threads,
    corpus: str = Corpus,
    seed: int = Seed,
    seeds: int = Seeds,
    out: Path = Out,
    as_json: bool = Json,
    quiet: bool = Quiet,
) -> None:
    """Plant every fault where it must be seen, seed after seed, and nothing else."""
    _run((), _options(locals() | {"quick": True, "faults": True}), out, as_json, quiet)


@app.command("all", epilog=EPILOG)
def everything(
    model: str = Model,
    dtype: str = Dtype,
    device: str = Device,
    rows: str = Rows,
    threads: int = Threads,
    corpus: str = Corpus,
    seed: int = Seed,
    seeds: int = Seeds,
    quick: bool = Quick,
    faults: bool = typer.Option(
        True, "--faults/--no-faults", help="Plant faults: each must be seen."
    ),
    out: Path = Out,
    as_json: bool = Json,
    quiet: bool = Quiet,
) -> None:
    """All four audits, and the table of faults and the audits that see them."""
    from lumotree.audit.faults.base import AUDITS

    _run(AUDITS, _options(locals()), out, as_json, quiet)


def _options(given: dict) -> dict:
    names = ("model", "dtype", "device", "rows", "threads", "corpus", "seed", "seeds")
    return {name: given[name] for name in (*names, "quick", "faults")}


def _run(
    audits: tuple[str, ...], options: dict, out: Path | None, as_json: bool, quiet: bool
) -> None:
    from replay.audit import AuditOptions, run_audits
    from replay.audittables import print_audit
    from replay.report.audit import write_audit_report
    from replay.tables import console
    from replay.talk import Bar, print_json, say

    def tell(text: str) -> None:
        if not quiet:
            say(text)

    with Bar(quiet) as bar:
        found, folder = run_audits(
            AuditOptions(audits, **options),
            out=out,
            command=["lumotree", *sys.argv[1:]],
            say=tell,
            note=bar.note,
        )
    report = write_audit_report(folder, found)
    if as_json:
        print_json(found)
    else:
        print_audit(console(), found)
    tell(f"audit folder: {folder}")
    tell(f"report: {report}")
    for text in found["undetected"]:
        say(text)
    if not found["passed"]:
        raise typer.Exit(1)
