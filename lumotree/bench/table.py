"""The mechanism table from the dictionaries that `lumotree.bench.gdn.Row.as_dict` makes."""

from __future__ import annotations

from typing import Any

STAGES = ("verify", "publish", "flush", "total")
HEADER = (
    *("verifier", "verify ms", "publish ms", "total ms (p10-p90)", "eager total ms"),
    *("buffers MiB", "output error", "state error", "bf16 outputs equal", "states equal"),
)


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """One line of the table; a red gate has reasons where timings would stand."""
    if "gate" not in row:
        return (row["name"], row.get("error", "not run"), *[""] * (len(HEADER) - 2))
    gate = row["gate"]
    title = row["title"] + (f" ({row['note']})" if row.get("note") else "")
    return (
        title,
        *_timings(row),
        f"{row['buffers_mib']:,.1f}",
        f"{gate['output_error']:.2e}",
        f"{gate['state_error']:.2e}",
        _share(gate["bf16_outputs_equal"], gate["cells"]),
        _share(gate["states_equal"], gate["cells"]),
    )


def _timings(row: dict[str, Any]) -> tuple[str, str, str, str]:
    if not row["gate"]["green"]:
        return ("red: " + "; ".join(row["gate"]["reasons"]), "", "", "")
    graph, eager = row["graph_ms"], row["eager_ms"]
    eager_total = f"{eager['total']['median']:.3f}" if eager else "-"
    if not graph:
        return ("-", "-", "-", eager_total)
    publish = f"{graph['publish']['median']:.3f}"
    if "flush" in graph:
        publish += f" (+{graph['flush']['median']:.3f} flush)"
    total = graph["total"]
    spread = f"{total['median']:.3f} ({total['p10']:.3f}-{total['p90']:.3f})"
    return (f"{graph['verify']['median']:.3f}", publish, spread, eager_total)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def plain(rows: list[dict[str, Any]]) -> str:
    """Columns padded for a terminal."""
    lines = [HEADER, *map(cells, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [HEADER, ("---",) * len(HEADER), *map(cells, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
