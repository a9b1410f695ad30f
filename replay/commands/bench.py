"""`lumotree bench`: the mechanism table of verifiers (gdn), rates by active requests (batch)."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

# Written between iterations on a processor: more than its caches hold.
HOST_FLUSH_BYTES = 64 * 2**20

app = typer.Typer(no_args_is_help=True, help="Time components and batches.", rich_markup_mode=None)


def register(parent: typer.Typer) -> None:
    parent.add_typer(app, name="bench")


@app.callback()
def root() -> None:
    pass


@app.command("gdn", epilog="Example: lumotree bench gdn --geometry tiny")
def gdn(
    geometry: str = typer.Option("tiny", help="27b, 9b, 4b, 2b, 0.8b or tiny."),
    tree: str = typer.Option("hydra27", help="Tree preset or list of parents; active rows only."),
    device: str = typer.Option("auto", help="cpu, cuda, or auto: cuda where there is one."),
    verifier: list[str] = typer.Option(None, "--verifier", help="Only these rows (repeatable)."),
    warmup: int = typer.Option(
        None, min=0, help="Iterations before the clock starts: 20, or 2 on a processor."
    ),
    iterations: int = typer.Option(None, min=1, help="Timed: 100, or 10 on a processor."),
    seed: int = typer.Option(0, help="Seed of the operands and states."),
    as_json: bool = typer.Option(False, "--json", help="Print the results as JSON."),
    quiet: bool = typer.Option(False, "--quiet", help="No progress on stderr."),
) -> None:
    """Verify, publish and total of each tree verifier, with its memory and its errors.

    Each row is first checked against a float64 recurrence and against native decoding of every
    path; a row that fails its check is not timed, and the command exits with 1.
    """
    from dataclasses import asdict

    import torch

    from lumotree.bench import gdn as bench
    from lumotree.bench.table import plain
    from lumotree.bench.timing import Protocol
    from lumotree.errors import LumoTreeError
    from lumotree.ops.gdn import GEOMETRIES
    from lumotree.verifiers import NAMES, verifier_class
    from replay.machine import describe_machine, describe_versions, git_commit
    from replay.talk import print_json, say

    if geometry not in GEOMETRIES:
        raise LumoTreeError(
            f"unknown geometry {geometry!r} in --geometry", f"one of {', '.join(GEOMETRIES)}"
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise LumoTreeError(f"unknown device {device!r} in --device", "cpu, cuda or auto")
    if device == "cuda" and not torch.cuda.is_available():
        raise LumoTreeError("--device cuda: torch sees no CUDA device here", "use --device cpu")
    names = verifier or list(NAMES)
    for name in names:
        verifier_class(name)

    case = bench.Case(
        GEOMETRIES[geometry], bench.active_tree(tree), torch.device(device), seed=seed
    )
    standard = Protocol() if device == "cuda" else Protocol(2, 10, HOST_FLUSH_BYTES)
    protocol = Protocol(
        standard.warmup if warmup is None else warmup,
        standard.timed if iterations is None else iterations,
        standard.flush_bytes,
    )
    if device == "cpu":
        say("no graph timings on a processor: eager ones alone")
    rows = []
    for row in bench.run(case, names, protocol):
        rows.append(row.as_dict())
        if not quiet:
            verdict = "ok" if row.gate.green else "; ".join(row.gate.reasons)
            say(f"{row.name}: {verdict}")
    if as_json:
        result = bench.describe(case)
        result |= {"machine": describe_machine(), "versions": describe_versions()}
        result["protocol"] = asdict(protocol)
        print_json({**result, "commit": git_commit(), "rows": rows})
    else:
        print(plain(rows))
    if not all(row["gate"]["green"] for row in rows):
        raise typer.Exit(1)


BATCH_EPILOG = """Examples:

lumotree bench batch --active 1,2,4 --tokens 48

lumotree bench batch --model rehearsal:4b --device cuda --out results/batch-4b"""


@app.command("batch", epilog=BATCH_EPILOG)
def batch(
    model: str = typer.Option(
        "embedded",
        help="embedded, rehearsal:SHAPE, or a folder or hub id of a Hugging Face checkpoint.",
    ),
    dtype: str = typer.Option("auto", help="auto, float32 or bfloat16."),
    device: str = typer.Option("auto", help="auto, cpu or cuda."),
    rows: str = typer.Option("natural", help="natural or matched row counts."),
    threads: int = typer.Option(None, help="CPU threads; default: as torch chooses."),
    arms: str = typer.Option("ar,mtp-5,lumotree", help="Arm specs of this process."),
    active: str = typer.Option("1,2,4,8,16", help="Numbers of active requests."),
    corpus: Path = typer.Option(Path("corpora/first.jsonl"), help="JSONL corpus of the prompts."),
    prompt_tokens: int = typer.Option(512, help="Last tokens kept of each prompt."),
    tokens: int = typer.Option(64, help="Tokens of each answer."),
    runs: int = typer.Option(3, help="Interleaved runs."),
    greedy: bool = typer.Option(
        False, "--greedy", help="Temperature 0. Default: the protocol's sampling, as in a replay."
    ),
    seed: int = typer.Option(0, help="With the request's id it gives the request's seed."),
    out: Path = typer.Option(None, help="Folder for batch.json, written after each size."),
    as_json: bool = typer.Option(False, "--json", help="Print the results as JSON."),
    quiet: bool = typer.Option(False, "--quiet", help="No progress on stderr."),
) -> None:
    """Tokens per second of all active requests together, by their number, and where trees stop
    paying.

    Every size serves the same requests in groups. Rounds are timed while all requests of a group
    are active; prompts are not. A request whose token ids depend on the arm or on the size is
    named, and the command exits with 1.
    """
    from replay.scaling import scaling_study
    from replay.scaling_options import ScalingOptions
    from replay.scaling_table import print_scaling
    from replay.study import write_study
    from replay.tables import console
    from replay.talk import print_json, say

    options = ScalingOptions.of(
        active,
        prompt_tokens,
        tokens,
        greedy,
        arms=(arms,),
        model=model,
        dtype=dtype,
        device=device,
        rows=rows,
        threads=threads,
        runs=runs,
        seed=seed,
    )
    target = None if out is None else _new_file(out, "batch.json")
    found = scaling_study(
        corpus,
        options,
        command=["lumotree", *sys.argv[1:]],
        note=(lambda text: None) if quiet else say,
        keep=(lambda found: None) if target is None else (lambda found: write_study(target, found)),
    )
    if target is not None and not quiet:
        say(f"written: {target}")
    if as_json:
        print_json(found)
    else:
        print_scaling(console(), found)
    difference = found["token_ids"]["first_difference"]
    if difference is not None:
        say(f"token ids differ: {difference}")
        if not found["model"]["equal_bits"]:
            say("the start-up probe found that equal bits do not hold on this machine")
        raise typer.Exit(1)


def _new_file(folder: Path, name: str) -> Path:
    """A file to be written, in a folder that is made now. Raises LumoTreeError."""
    from lumotree.errors import LumoTreeError

    if (folder / name).exists():
        raise LumoTreeError(f"--out: {folder / name} is there already", "name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LumoTreeError(f"--out: {folder} cannot be made: {error.strerror}") from None
    return folder / name
