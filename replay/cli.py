"""The `lumotree` command. Imports nothing heavy: `--help` must answer at once."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from lumotree.errors import LumoTreeError
from replay.commands import (
    agent_study,
    audit,
    bench,
    breakeven,
    compare,
    corpus,
    doctor,
    export,
    model,
    plot,
    record,
    replay,
    report,
    serve,
    tree,
    variants,
)

INTERRUPTED = 130


class Group(TyperGroup):
    """The one place where a LumoTreeError becomes a sentence and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except LumoTreeError as error:
            if os.environ.get("LUMOTREE_DEBUG") == "1":
                raise
            print(f"lumotree: {error}", file=sys.stderr)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            print("lumotree: interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=Group,
    name="lumotree",
    help="LumoTree: path-parallel speculative decoding for hybrid language models, and its "
    "benchmark.\n\nExit codes: 0 done, 1 ran and failed a check, 2 wrong use, 130 interrupted. "
    "Set LUMOTREE_DEBUG=1 for tracebacks.",
    epilog="Example: lumotree replay corpora/first.jsonl --arms all",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(version("lumotree"))
        raise typer.Exit()


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


replay.register(app)
compare.register(app)
breakeven.register(app)
variants.register(app)
plot.register(app)
report.register(app)
export.register(app)
corpus.register(app)
agent_study.register(app)
tree.register(app)
model.register(app)
serve.register(app)
record.register(app)
bench.register(app)
audit.register(app)
doctor.register(app)


def main() -> None:
    """Entry point of the `lumotree` script."""
    app()


if __name__ == "__main__":
    main()
