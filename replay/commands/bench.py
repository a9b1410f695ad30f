"""`lumotree bench gdn`: the mechanism table, one row per verifier of the recurrent part."""

from __future__ import annotations

import typer

# Written between iterations on a processor: more than its caches hold.
HOST_FLUSH_BYTES = 64 * 2**20

app = typer.Typer(no_args_is_help=True, help="Time components alone.", rich_markup_mode=None)


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
