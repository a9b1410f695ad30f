"""What `lumotree bench batch` prints: rates by size, ratios, and what a round is made of."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from replay.scaling_summary import EVEN
from replay.tables import NONE, plain_table


def print_scaling(out: Console, found: dict[str, Any]) -> None:
    """Tables, the sentences of the conclusion, and how many answers were equal."""
    out.print(rate_table(found))
    out.print()
    out.print(round_table(found))
    out.print()
    for entry in found["unavailable"]:
        out.print(f"{entry['arm']} at {entry['active']} active: {entry['reason']}", markup=False)
    for sentence in found["conclusion"]:
        out.print(sentence, markup=False)
    ids = found["token_ids"]
    out.print(
        f"{ids['equal']} of {ids['answers']} answers have the token ids of their request's first "
        "answer, over all arms and sizes."
    )


def rate_table(found: dict[str, Any]) -> Table:
    """One row per size: the aggregate rate of each arm and the ratios, medians over their ranges.

    A ratio that is not separated has a question mark.
    """
    label = found["model"].get("label")
    title = "Tokens per second of all active requests together"
    table = plain_table(f"{title}: {label}" if label else title)
    table.add_column("active", justify="right")
    arms = found["options"]["arms"]
    pairs = list(dict.fromkeys((e["arm"], e["baseline"]) for e in found["ratios"]))
    for name in arms:
        table.add_column(f"{name}\ntok/s", justify="right", overflow="fold")
    for arm, base in pairs:
        table.add_column(f"{arm}\n/ {base}", justify="right", overflow="fold")
    cells = {(cell["active"], cell["arm"]): cell for cell in found["cells"]}
    ratios = {(e["active"], e["arm"], e["baseline"]): e for e in found["ratios"]}
    for active in found["options"]["active"]:
        table.add_row(
            str(active),
            *(_rate(cells.get((active, arm))) for arm in arms),
            *(_ratio(ratios.get((active, *pair))) for pair in pairs),
        )
    return table


def round_table(found: dict[str, Any]) -> Table:
    """One row per size and arm: medians over the runs, times in milliseconds."""
    table = plain_table("Rounds, ms")
    table.add_column("active", justify="right")
    table.add_column("arm", overflow="fold")
    measured = [cell["phases_ms_per_round"] for cell in found["cells"]]
    phases = next((list(one) for one in measured if one), [])
    for name in ("round", "tok/step", *phases, "ttft"):
        table.add_column(name, justify="right", no_wrap=True)
    arms = found["options"]["arms"]
    for cell in sorted(found["cells"], key=lambda c: (c["active"], arms.index(c["arm"]))):
        own = cell["phases_ms_per_round"] or {}
        table.add_row(
            str(cell["active"]),
            cell["arm"],
            f"{cell['ms_per_round']:.2f}",
            f"{cell['tokens_per_step']:.2f}",
            *(f"{own[name]:.2f}" if name in own else NONE for name in phases),
            f"{1e3 * cell['ttft_s']:.1f}",
        )
    return table


def _rate(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return NONE
    low, high = cell["run_range_tok_s"]
    return f"{cell['tok_s']:.1f}\n{low:.1f}-{high:.1f}"


def _ratio(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return NONE
    low, high = entry["run_range"]
    doubt = " ?" if entry["verdict"] == EVEN else ""
    return f"{entry['ratio']:.2f}{doubt}\n{low:.2f}-{high:.2f}"
