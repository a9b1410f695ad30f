"""Tables and sentences of a run for a terminal. Rendering reads the saved summary only."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from lumotree.request import PHASES
from replay.report.cells import Table as PageTable
from replay.report.words import headline, interval_of

NONE = "-"


def console(stderr: bool = False) -> Console:
    """A console that does not cut tables short when it writes to a file or a pipe."""
    out = Console(stderr=stderr, highlight=False, soft_wrap=False)
    return out if out.is_terminal else Console(stderr=stderr, highlight=False, width=140)


def pooled_table(summary: dict[str, Any]) -> Table:
    """One row per arm: the pooled rate, what it is made of, and the arm's status or reason.

    It fits 80 columns: only the status and long specs wrap.
    """
    comparisons = {entry["arm"]: entry for entry in summary["comparisons"]}
    baseline = next((entry["baseline"] for entry in comparisons.values()), "baseline")
    label = summary.get("label")
    table = plain_table(f"Pooled decode rate: {label}" if label else "Pooled decode rate")
    table.add_column("arm", overflow="fold", min_width=12, max_width=28)
    for name in (
        "tok/s",
        "run range",
        f"x {baseline}",
        "tok/\nstep",
        "ms/\nstep",
        "req.",
        "tokens",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("status", overflow="fold", min_width=10)
    for name, arm in summary["arms"].items():
        spread = arm["run_range_tok_s"]
        table.add_row(
            name,
            _number(arm["pooled_tok_s"]) if arm["status"] != "withheld" else "withheld",
            f"{spread[0]:.2f}-{spread[1]:.2f}" if spread else NONE,
            _number(comparisons[name]["ratio"] if name in comparisons else None),
            _number(arm["tokens_per_step"]),
            _number(arm["ms_per_step"]),
            str(arm["requests"]) if arm["requests"] else NONE,
            str(arm["completion_tokens"]) if arm["requests"] else NONE,
            arm["reason"] or arm["status"],
        )
    return table


def comparison_table(comparisons: list[dict[str, Any]], title: str) -> Table | None:
    """One row per paired comparison, the A/A floor beside each; None without any.

    `x` is the ratio of pooled rates, `per req.` the geometric mean of the requests' own ratios,
    `w/l/t` requests won, lost and tied; under an interval stands how it came about,
    under a floor the drift between the compared folders.
    """
    if not comparisons:
        return None
    baselines = {entry["baseline"] for entry in comparisons}
    table = plain_table(title)
    table.add_column("arm", overflow="fold", min_width=10, max_width=28)
    if len(baselines) > 1:
        table.add_column("against", overflow="fold", min_width=10, max_width=28)
    for name in ("x", "95 % interval", "per\nreq.", "A/A\nfloor", "w/l/t"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold", min_width=12)
    for entry in comparisons:
        low, floor = entry["ci_low"], entry["aa_floor"]
        against = [entry["baseline"]] if len(baselines) > 1 else []
        word = entry["verdict"]
        table.add_row(
            entry["arm"],
            *against,
            _number(entry["ratio"]),
            NONE if low is None else f"{low:.3f}-{entry['ci_high']:.3f}\n{_origin(entry)}",
            _number(entry["request_ratio"]),
            NONE if floor is None else f"{100 * floor:.1f} %" + _drift(entry),
            NONE if entry["wins"] is None else f"{entry['wins']}/{entry['losses']}/{entry['ties']}",
            word if word in ("faster", "slower") else f"{word}: {entry['reason']}",
        )
    return table


def _origin(entry: dict[str, Any]) -> str:
    """`interval_of` on lines that fit the column of intervals."""
    return (interval_of(entry) or "").replace(", a", ",\na").replace(": ", ":\n")


def _drift(entry: dict[str, Any]) -> str:
    """What drift between folders adds to the A/A floor, on a line of its own."""
    drift = entry.get("drift")
    return "" if drift is None else f"\n+ {100 * drift:.1f} %"


def rate_table(runs: dict[str, Any]) -> Table:
    """Pooled and per-request-equal rates of every arm of the compared runs, side by side."""
    table = plain_table("Decode rates, tok/s")
    table.add_column("arm", overflow="fold", min_width=12, max_width=40)
    for name in ("pooled", "per-request equal", "A/A floor"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("status", overflow="fold", min_width=10)
    for run, about in runs.items():
        for name, arm in about["arms"].items():
            floor = arm["aa_floor"]
            table.add_row(
                f"{run}/{name}" if len(runs) > 1 else name,
                _number(arm["pooled_tok_s"]),
                _number(arm["mean_request_tok_s"]),
                NONE if floor is None else f"{100 * floor:.1f} %",
                f"{arm['status']}: {arm['reason']}" if arm["reason"] else arm["status"],
            )
    return table


def print_comparison(out: Console, found: dict[str, Any]) -> None:
    """What `lumotree compare` prints. Runs that should not have been compared say so first."""
    for text in found["differences"]:
        out.print(f"Not the same experiment: {text}", style="bold")
    out.print(rate_table(found["runs"]))
    out.print()
    title = "Paired comparisons"
    baselines = {entry["baseline"] for entry in found["comparisons"]}
    if len(baselines) == 1:
        title += f" with {baselines.pop()}"
    if found["differences"]:
        title += " (of runs that differ)"
    table = comparison_table(found["comparisons"], title)
    out.print(table if table is not None else "No two arms completed a request in common.")
    for text in found["notes"]:
        out.print(f"note: {text}")


def breakeven_table(rows: list[dict[str, Any]]) -> Table:
    """The break-even map: cost and gain of each tree; `eaten` is publishing's share of the gain."""
    table = plain_table("Break-even map, ms per step")
    table.add_column("tree", overflow="fold", min_width=12, max_width=22)
    for name in (
        "rows", "depth", "draft", "verify", "publish", "sum", "tok/\nstep", "break\neven",
        "tok/s", "eaten",
    ):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        share = row["publish_share_of_advantage"]
        table.add_row(
            row["name"],
            str(row["rows"]),
            str(row["depth"]),
            *(_number(row[key]) for key in ("draft_ms", "verify_ms", "publish_ms", "ms_per_step")),
            _number(row["tokens_per_step"]),
            _number(row["break_even_tokens_per_step"]),
            NONE if row["tok_s"] is None else f"{row['tok_s']:.1f}",
            NONE if share is None else f"{100 * share:.0f} %",
        )
    return table


def cost_sentence(cost: dict[str, Any] | None) -> str:
    """The fitted cost of a step, with its error on trees it has not seen."""
    if cost is None:
        return "Too few trees for a cost model."
    error = "unknown"
    if cost["loo_rmse_ms"] is not None:
        error = f"{cost['loo_rmse_ms']:.2f} ms, {100 * cost['loo_relative']:.0f} %"
    return (
        f"A step costs {cost['fixed_ms']:.2f} ms + {cost['per_pass_ms']:.2f} per drafting pass + "
        f"{cost['per_row_ms']:.3f} per row (error on a tree left out: {error})."
    )


def print_breakeven(out: Console, found: dict[str, Any]) -> None:
    """What `lumotree breakeven` prints."""
    out.print(breakeven_table(found["map"]))
    out.print()
    out.print(cost_sentence(found["cost_model"]))
    for text in found["conclusion"]:
        out.print(text)
    choice = found["choice"]
    suffix = "with suffix drafts" if choice["suffix"] else "without suffix drafts"
    out.print(
        f"tree=auto would decode with {choice['tree']}, {choice['passes']} passes, {suffix}: "
        f"predicted {choice['predicted_tok_s']:.1f} tok/s, "
        f"{choice['predicted_tokens_per_step']:.2f} tokens in "
        f"{choice['predicted_ms_per_step']:.2f} ms."
    )


def phase_table(summary: dict[str, Any]) -> Table | None:
    """Milliseconds per step by phase; None when no arm reports phases."""
    measured = {n: a for n, a in summary["arms"].items() if a["phases_ms_per_step"]}
    if not measured:
        return None
    table = plain_table("Phases, ms per step")
    table.add_column("arm", overflow="fold", min_width=12, max_width=28)
    for name in (*PHASES, "sum"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, arm in measured.items():
        phases = [arm["phases_ms_per_step"].get(phase, 0.0) for phase in PHASES]
        table.add_row(name, *(f"{value:.3f}" for value in (*phases, sum(phases))))
    return table


def warnings(summary: dict[str, Any]) -> list[str]:
    """What guards found that does not withhold a headline."""
    return [
        f"warning: {name}: {check['reason']}"
        for name, arm in summary["arms"].items()
        for check in arm["guards"].get("checks", ())
        if check["status"] == "warn"
    ]


def print_run(out: Console, summary: dict[str, Any]) -> None:
    """The tables, what guards warn of, and the headline."""
    out.print(pooled_table(summary))
    title = f"Paired comparison with {summary.get('baseline')}"
    compared = comparison_table(summary["comparisons"], title)
    if compared is not None:
        out.print()
        out.print(compared)
    phases = phase_table(summary)
    if phases is not None:
        out.print()
        out.print(phases)
    out.print()
    for line in warnings(summary):
        out.print(line)
    out.print(headline(summary))


def plain_table(title: str) -> Table:
    """An empty table in the look of all of them."""
    return Table(
        box=box.SIMPLE_HEAD,
        title=title,
        title_justify="left",
        padding=(0, 1, 0, 0),
        show_edge=False,
    )


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def paper_table(data: PageTable) -> Table:
    """A table of `replay.paper_tables` for a terminal."""
    table = plain_table(data.title)
    for (name, unit), right in zip(data.columns, data.numeric, strict=True):
        heading = f"{name}\n{unit}" if unit else name
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    for row in data.rows:
        table.add_row(*(cell.text for cell in row))
    return table
