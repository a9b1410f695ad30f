"""`lumotree tree show`: a tree descriptor, drawn."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, help="Look at tree descriptors.", rich_markup_mode=None)


def register(parent: typer.Typer) -> None:
    parent.add_typer(app, name="tree")


@app.callback()
def root() -> None:
    pass


@app.command(
    "show",
    epilog="Example: lumotree tree show hydra27",
    # A parent list starts with -1, which is no option.
    context_settings={"ignore_unknown_options": True},
)
def show(
    preset: str = typer.Argument(
        "hydra27", help="root, chain-K, hydra27, or a parent list such as -1,0,0,1."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the descriptor as JSON."),
) -> None:
    """Draw a descriptor: its nodes, its path schedule and its slots."""
    from lumotree.tree import tree_from_name
    from replay.talk import print_json
    from replay.treeview import as_dict, draw

    tree = tree_from_name(preset)
    if as_json:
        print_json(as_dict(preset, tree))
    else:
        print(draw(preset, tree))
