"""What is predicted for other trees, and the break-even map of this machine and corpus."""

from __future__ import annotations

from typing import Any

from replay.report.cells import NONE, Cell, Table, count, number, words
from replay.report.view import RunView


def cost_table(view: RunView) -> Table | None:
    """The fitted cost of a step, and the trees predicted to be best from it.

    Without a known error there are no predictions, only what the fit says: earlier versions
    saved some all the same.
    """
    cost = view.summary.get("cost_model")
    if not cost:
        return None
    if cost.get("loo_relative") is None:
        return _unknown_error(cost)
    if not cost.get("predicted"):
        return None
    note = (
        f"A step costs {cost['fixed_ms']:.2f} ms, {cost['per_pass_ms']:.2f} more per drafting "
        f"pass and {cost['per_row_ms']:.3f} per row, fitted to {cost['designs']} trees of this run"
    )
    note += f"; a tree left out of the fit is predicted to {100 * cost['loo_relative']:.0f} %"
    note += ". These are predictions, not measurements: run a tree as an arm to know."
    note += _nominal(cost)
    columns = [("tree", ""), ("passes", ""), ("suffix", ""), ("rows", ""), ("tokens", "per step")]
    columns += [("time", "ms per step"), ("predicted rate", "tok/s")]
    rows = [
        [
            words(found["tree"], "name"),
            count(found["passes"]),
            words("on" if found.get("suffix") else "off"),
            count(found.get("rows")),
            number(found.get("tokens_per_step")),
            number(found.get("ms_per_step"), 1),
            number(found.get("tok_s"), 1),
        ]
        for found in cost["predicted"]
    ]
    return Table("cost", "Trees predicted to be best here", columns, rows, note)


def _unknown_error(cost: dict[str, Any]) -> Table:
    columns = [("fixed", "ms per step"), ("drafting pass", "ms"), ("verified row", "ms")]
    columns += [("trees", "fitted")]
    row = [number(cost[key], 3) for key in ("fixed_ms", "per_pass_ms", "per_row_ms")]
    reason = "as many trees as coefficients"
    if cost["designs"] > 3:
        reason = "a coefficient rests on one tree alone"
    note = f"Error unknown: {reason}. So no other tree is predicted." + _nominal(cost)
    return Table("cost", "Cost of a step", columns, [[*row, count(cost["designs"])]], note)


def _nominal(cost: dict[str, Any]) -> str:
    """Rows do not say how many drafts a step carried, see `runmodel`."""
    if cost.get("rows") != "nominal":
        return ""
    return (
        " Rows are nominal: every row that an arm's drafters may fill counts, which is an upper "
        "bound where suffix drafts are rare."
    )


def breakeven_table(found: dict[str, Any]) -> Table:
    """The break-even map as figures: cost and gain of each tree."""
    columns = [("tree", ""), ("rows", ""), ("depth", ""), ("draft", "ms"), ("verify", "ms")]
    columns += [("publish", "ms"), ("step", "ms"), ("tokens", "per step")]
    columns += [("break-even", "tokens per step"), ("rate", "tok/s"), ("eaten", "by publishing")]
    keys = ("draft_ms", "verify_ms", "publish_ms", "ms_per_step", "tokens_per_step")
    rows = []
    for row in found["map"]:
        eaten = row.get("publish_share_of_advantage")
        share = Cell(NONE, kind="num soft") if eaten is None else number(100 * eaten, 0)
        rows.append(
            [
                words(row["name"], "name"),
                count(row.get("rows")),
                count(row.get("depth")),
                *(number(row.get(key)) for key in keys),
                number(row.get("break_even_tokens_per_step")),
                number(row.get("tok_s"), 1),
                share if eaten is None else Cell(f"{share.text} %", eaten, "num"),
            ]
        )
    return Table(
        "breakeven", "Break-even map", columns, rows, " ".join(found.get("conclusion") or ())
    )
