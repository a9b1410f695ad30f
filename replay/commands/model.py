"""`lumotree model export`: any model it can load, as a folder other engines load."""

from __future__ import annotations

from pathlib import Path

import typer

app = typer.Typer(no_args_is_help=True, help="Convert models.", rich_markup_mode=None)


def register(parent: typer.Typer) -> None:
    parent.add_typer(app, name="model")


@app.callback()
def root() -> None:
    pass


@app.command("export", epilog="Example: lumotree model export rehearsal:27b out/27b")
def export(
    model: str = typer.Argument(
        ..., help="embedded, rehearsal:SHAPE, or a folder or hub id of a Hugging Face checkpoint."
    ),
    folder: Path = typer.Argument(..., help="New folder to write into."),
    wrapper: str = typer.Option(
        "multimodal",
        help="multimodal: as servers of Qwen3_5ForConditionalGeneration want it, with a vision "
        "tower of one tiny random layer; text: Qwen3_5ForCausalLM.",
    ),
    dtype: str = typer.Option("bfloat16", help="bfloat16 or float32."),
    device: str = typer.Option("auto", help="Where weights are made: auto, cpu or cuda."),
    as_json: bool = typer.Option(False, "--json", help="Print the files as JSON."),
    quiet: bool = typer.Option(False, "--quiet", help="No progress on stderr."),
) -> None:
    """Write a Hugging Face folder: safetensors shards, config, tokenizer, chat template.

    One shard is in memory at a time. A rehearsal is written with its label (lumotree.json).
    """
    import torch

    from lumotree.engine import DTYPES, pick_device
    from lumotree.errors import LumoTreeError
    from lumotree.model.export import export_model
    from lumotree.model.source import open_source
    from replay.talk import print_json, say

    if dtype not in DTYPES:
        raise LumoTreeError(f"--dtype {dtype!r} is unknown", f"use {' or '.join(DTYPES)}")
    source = open_source(model)

    def note(name: str, done: int, total: int) -> None:
        if not quiet:
            say(f"{name}: {done / 2**30:.2f} of {total / 2**30:.2f} GiB")

    files = export_model(
        source,
        folder,
        wrapper=wrapper,
        dtype=DTYPES[dtype],
        device=torch.device(pick_device(device)),
        note=note,
    )
    if as_json:
        sizes = {path.name: path.stat().st_size for path in files}
        print_json({"model": model, "folder": str(folder), "bytes": sizes, **source.about()})
    else:
        print("\n".join(map(str, files)))
