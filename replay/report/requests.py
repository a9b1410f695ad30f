"""The per-request table: every request once, its rate under each arm beside the others."""

from __future__ import annotations

from replay.pooling import decode_rate
from replay.report.cells import NONE, Cell, Table, count, number, words
from replay.report.view import RunView
from replay.rows import Row


def request_table(view: RunView) -> Table | None:
    """Rates pool the runs of a request. Prompt lengths that differ between arms are marked."""
    arms = view.measured
    if not arms:
        return None
    by_request: dict[str, dict[str, list[Row]]] = {}
    for arm in arms:
        for row in arm.rows:
            by_request.setdefault(row.request_id, {}).setdefault(arm.name, []).append(row)
    base, best = view.baseline, view.winner
    if best is base:
        others = [arm for arm in arms if arm is not base and not arm.withheld]
        best = max(others, key=lambda arm: arm.rate or 0, default=None)
    withheld = {arm.name for arm in arms if arm.withheld}
    rows = []
    for request, found in by_request.items():
        own = [row for group in found.values() for row in group]
        rates = {name: decode_rate(group) for name, group in found.items()}
        top = max((r for name, r in rates.items() if r and name not in withheld), default=None)
        cells = [
            words(request, "name"),
            _span([row.prompt_tokens for row in own]),
            _span([row.completion_tokens for row in own]),
            words(" ".join(sorted({row.finish_reason or NONE for row in own}))),
        ]
        for arm in arms:
            rate = None if arm.withheld else rates.get(arm.name)
            cells.append(number(rate, 1, "best" if rate is not None and rate == top else ""))
        if best is not None and base is not None:
            over, under = rates.get(best.name), rates.get(base.name)
            cells.append(number(over / under if over and under else None))
        rows.append(cells)
    columns = [("request", ""), ("prompt", "tokens"), ("output", "tokens"), ("end", "")]
    columns += [(arm.name, "withheld" if arm.withheld else "tok/s") for arm in arms]
    if best is not None and base is not None:
        columns.append(("ratio", f"{best.name} / {base.name}"))
    note = "Each rate pools all runs of the request; the fastest arm of a request is bold."
    return Table("requests", f"{len(rows):,} requests", columns, rows, note)


def _span(values: list[int]) -> Cell:
    low, high = min(values), max(values)
    if low == high:
        return count(low)
    return Cell(f"{low:,} – {high:,}", low, "num bad", title="differs between arms or runs")
