"""One paired comparison: two arms, the requests both completed, an interval and a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from replay.pooling import request_rate
from replay.rows import Row
from replay.statistics import aa_floor, interval, pair, tally, verdict


@dataclass(frozen=True)
class Side:
    """One arm of one run as a side of a comparison. `withheld` says why it has no headline."""

    label: str
    rows: Sequence[Row]
    conversations: Mapping[str, str | None] = field(default_factory=dict)
    withheld: str | None = None


APART = "the runs are not interleaved"


def compare_sides(
    ours: Side, base: Side, *, same_run: bool = True, drift: float | None = None
) -> dict[str, Any] | None:
    """One `comparisons` entry; None when the two completed no request in common.

    A ratio is of pooled rates over shared requests; `request_ratio` is the geometric mean of the
    requests' own ratios, each request equal. With a withheld side the figures move to `withheld`.
    Sides of two folders (not `same_run`) are never separated without `drift`, the relative
    difference that an arm of both folders shows between them.
    """
    pairs = pair(ours.rows, base.rows, ours.conversations, same_run=same_run)
    if pairs is None:
        return None
    floors = [aa_floor(ours.rows), aa_floor(base.rows)]
    floor = None if None in floors else max(floors)
    ci = interval(pairs)
    name, reason = verdict(pairs.ratio, ci, floor, drift)
    if not same_run and drift is None:
        name, reason = "not separated", APART
    band = None if floor is None else (1 + floor) * (1 + (drift or 0.0)) - 1
    won, lost, tied = tally(pairs, band)
    tokens, seconds, base_tokens, base_seconds = pairs.sums.sum(axis=1)
    shared = _keys(ours.rows, same_run) & _keys(base.rows, same_run)
    measured = {
        "ratio": pairs.ratio,
        "ci_low": ci.low if ci else None,
        "ci_high": ci.high if ci else None,
        "request_ratio": float(np.exp(pairs.log_ratios.mean())) if len(pairs.log_ratios) else None,
        "pooled_tok_s": float(tokens / seconds),
        "mean_request_tok_s": _mean(ours.rows, shared, same_run),
        "baseline_pooled_tok_s": float(base_tokens / base_seconds),
        "baseline_mean_request_tok_s": _mean(base.rows, shared, same_run),
        "wins": won,
        "losses": lost,
        "ties": tied,
    }
    entry: dict[str, Any] = {"arm": ours.label, "baseline": base.label, **measured}
    entry |= {
        "aa_floor": floor,
        "drift": drift,
        "verdict": name,
        "reason": reason,
        "requests": len(pairs.requests),
        "method": ci.method if ci else None,
        "resampled": ci.resampled if ci else None,
        "clusters": len(set(pairs.groups.tolist())),
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


def _key(row: Row, same_run: bool) -> tuple[int, str]:
    return (row.run if same_run else 0, row.request_id)


def _keys(rows: Sequence[Row], same_run: bool) -> set[tuple[int, str]]:
    return {_key(row, same_run) for row in rows if row.completed}


def _mean(rows: Sequence[Row], shared: set[tuple[int, str]], same_run: bool) -> float | None:
    return request_rate([r for r in rows if r.completed and _key(r, same_run) in shared])
