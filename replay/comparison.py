"""One paired comparison: two arms, the requests both completed, an interval and a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from replay.pooling import decode_rate, request_rate
from replay.rows import Row
from replay.statistics import aa_floor, interval, pair, tally, verdict


@dataclass(frozen=True)
class Side:
    """One arm of one run as a side of a comparison. `withheld` says why it has no headline."""

    label: str
    rows: Sequence[Row]
    conversations: Mapping[str, str | None] = field(default_factory=dict)
    withheld: str | None = None


def compare_sides(ours: Side, base: Side, *, same_run: bool = True) -> dict[str, Any] | None:
    """One `comparisons` entry; None when the two completed no request in common.

    A ratio is of pooled rates over shared requests; `request_ratio` is the geometric mean of the
    requests' own ratios, each request equal. With a withheld side the figures move to `withheld`.
    """
    pairs = pair(ours.rows, base.rows, ours.conversations, same_run=same_run)
    if pairs is None:
        return None
    floors = [aa_floor(ours.rows), aa_floor(base.rows)]
    floor = None if None in floors else max(floors)
    ci = interval(pairs)
    name, reason = verdict(pairs.ratio, ci, floor)
    won, lost, tied = tally(pairs, floor)
    shared = set(pairs.requests)
    measured = {
        "ratio": pairs.ratio,
        "ci_low": ci.low if ci else None,
        "ci_high": ci.high if ci else None,
        "request_ratio": float(np.exp(pairs.log_ratios.mean())) if len(pairs.log_ratios) else None,
        **_rates("", [row for row in ours.rows if row.request_id in shared]),
        **_rates("baseline_", [row for row in base.rows if row.request_id in shared]),
        "wins": won,
        "losses": lost,
        "ties": tied,
    }
    entry: dict[str, Any] = {"arm": ours.label, "baseline": base.label, **measured}
    entry |= {
        "aa_floor": floor,
        "verdict": name,
        "reason": reason,
        "requests": len(pairs.requests),
        "resampled": ci.resampled if ci else None,
        "clusters": ci.clusters if ci else None,
    }
    faults = [f"{side.label}: {side.withheld}" for side in (ours, base) if side.withheld]
    if faults:
        entry |= dict.fromkeys(measured) | {
            "verdict": "withheld",
            "reason": "; ".join(faults),
            "withheld": measured,
        }
    return entry


def compare_run(
    rows: Sequence[Row],
    arms: Mapping[str, str | None],
    baseline: str,
    conversations: Mapping[str, str | None],
) -> list[dict[str, Any]]:
    """Every arm of a run against `baseline`. `arms` maps names to why they are withheld."""
    by_arm: dict[str, list[Row]] = {name: [] for name in arms}
    for row in rows:
        if row.arm in by_arm:
            by_arm[row.arm].append(row)
    sides = {name: Side(name, by_arm[name], conversations, why) for name, why in arms.items()}
    found = [
        compare_sides(side, sides[baseline]) for name, side in sides.items() if name != baseline
    ]
    return [entry for entry in found if entry is not None]


def _rates(prefix: str, rows: Sequence[Row]) -> dict[str, float | None]:
    done = [row for row in rows if row.completed]
    return {
        f"{prefix}pooled_tok_s": decode_rate(done),
        f"{prefix}mean_request_tok_s": request_rate(done),
    }
