"""Tables and sentences of a run for a terminal. Rendering reads the saved summary only."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from lumotree.request import PHASES

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
    table = _table("Pooled decode rate")
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
            _number(arm["pooled_tok_s"]),
            f"{spread[0]:.2f}-{spread[1]:.2f}" if spread else NONE,
            _number(comparisons[name]["ratio"] if name in comparisons else None),
            _number(arm["tokens_per_step"]),
            _number(arm["ms_per_step"]),
            str(arm["requests"]) if arm["requests"] else NONE,
            str(arm["completion_tokens"]) if arm["requests"] else NONE,
            arm["reason"] or arm["status"],
        )
    return table


def phase_table(summary: dict[str, Any]) -> Table | None:
    """Milliseconds per step by phase; None when no arm reports phases."""
    measured = {n: a for n, a in summary["arms"].items() if a["phases_ms_per_step"]}
    if not measured:
        return None
    table = _table("Phases, ms per step")
    table.add_column("arm", overflow="fold", min_width=12, max_width=28)
    for name in (*PHASES, "sum"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, arm in measured.items():
        phases = [arm["phases_ms_per_step"].get(phase, 0.0) for phase in PHASES]
        table.add_row(name, *(f"{value:.3f}" for value in (*phases, sum(phases))))
    return table


def verdict(summary: dict[str, Any]) -> str:
    """Which arm won on this machine, also when plain decoding did."""
    fastest = summary["fastest"]
    if fastest is None:
        return "No arm completed a request, so there is no rate."
    rates = {n: a["pooled_tok_s"] for n, a in summary["arms"].items() if a["pooled_tok_s"]}
    rate = f"{rates[fastest]:.2f} tok/s"
    others = sorted((n for n in rates if n != fastest), key=rates.get, reverse=True)
    if not others:
        return f"Only {fastest} was measured: {rate}."
    if fastest == "ar":
        share = rates[others[0]] / rates[fastest]
        return (
            f"On this machine plain decoding wins: ar reaches {rate}; "
            f"the best other arm, {others[0]}, reaches {share:.2f} of it."
        )
    against = "ar" if "ar" in rates else others[0]
    ratio = rates[fastest] / rates[against]
    return f"On this machine {fastest} wins: {rate}, {ratio:.2f} times {against}."


def print_run(out: Console, summary: dict[str, Any]) -> None:
    """Both tables and the verdict."""
    out.print(pooled_table(summary))
    phases = phase_table(summary)
    if phases is not None:
        out.print()
        out.print(phases)
    out.print()
    out.print(verdict(summary))


def _table(title: str) -> Table:
    return Table(
        box=box.SIMPLE_HEAD,
        title=title,
        title_justify="left",
        padding=(0, 1, 0, 0),
        show_edge=False,
    )


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"
