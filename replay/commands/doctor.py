"""`lumotree doctor`: what this machine can run, and why not the rest."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    app.command("doctor", epilog="Example: lumotree doctor --model rehearsal:27b --context 16384")(
        doctor
    )


def doctor(
    model: str = typer.Option(
        "embedded",
        help="embedded, rehearsal:SHAPE, or a folder or hub id: the kernels, the probe and the "
        "external arms are those of this model.",
    ),
    context: int = typer.Option(
        32768, min=1, help="Tokens of prompt and answer that a state must hold."
    ),
    device: str = typer.Option("auto", help="auto, cpu or cuda."),
    dtype: str = typer.Option("auto", help="auto, float32 or bfloat16."),
    probe: bool = typer.Option(
        False, "--probe", help="Load the model and find out whether equal bits hold here."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the findings as JSON."),
) -> None:
    """Inspect this machine: versions, limits of its GPUs, which models fit, which kernels run.

    For each external arm it prints the command that starts its server, and what stands in the
    way here. The exit code is 0 when the machine could be inspected, whatever was found.
    """
    from replay.doctor import examine
    from replay.doctor_text import text
    from replay.talk import print_json

    found = examine(model, context=context, device=device, dtype=dtype, probe=probe)
    if as_json:
        print_json(found)
    else:
        print(text(found))
