"""The table of a replay under load, for a terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

NONE = "-"


def load_table(load: dict[str, Any]) -> Table:
    """One row per arm of `load` in summary.json."""
    table = Table(title=_title(load), box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("arm", overflow="fold", min_width=12, max_width=28)
    for name in (
        "req./s",
        "tok/s",
        "ttft, s\np50/p95/p99",
        "e2e, s\np50/p95/p99",
        "between bursts, ms\np50/p95/p99",
        "good\nreq./s",
        "failed",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for name, arm in load["arms"].items():
        table.add_row(
            name,
            _number(arm["requests_per_s"]),
            _number(arm["output_tok_s"]),
            _percentiles(arm["ttft_s"]),
            _percentiles(arm["e2e_s"]),
            _percentiles(arm["burst_s"], 1e3),
            _number(arm["goodput_per_s"]),
            str(arm["failed_requests"]),
        )
    return table


def _title(load: dict[str, Any]) -> str:
    if load["arrivals"] is None:
        how = f"{load['concurrency']} requests in flight"
    else:
        how = f"{load['arrivals']} arrivals"
    limits = ", ".join(f"{name} {s:g} s" for name, s in load["limits_s"].items())
    return f"Under load: {how}" + (f"; good within {limits}" if limits else "")


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def _percentiles(values: dict[str, float] | None, scale: float = 1.0) -> str:
    return NONE if values is None else "/".join(f"{scale * v:.2f}" for v in values.values())
