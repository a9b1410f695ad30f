"""What the rows of `lumotree bench batch` say: medians, paired ratios, where trees stop paying."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from statistics import median
from typing import Any

Row = dict[str, Any]
AHEAD, BEHIND, EVEN = "ahead", "behind", "not separated"
BEFORE_BASE = {AHEAD: "ahead of", BEHIND: "behind", EVEN: "not separated from"}


def summarise(rows: Sequence[Row], pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """`cells`, one per size and arm; `ratios`, one per pair and size; `conclusion`, sentences.

    pairs: (arm, baseline) names.
    """
    ratios = [entry for arm, base in pairs for entry in ratios_of(rows, arm, base)]
    return {
        "cells": cells_of(rows),
        "ratios": ratios,
        "conclusion": [
            crossover(arm, base, [e for e in ratios if (e["arm"], e["baseline"]) == (arm, base)])
            for arm, base in pairs
        ],
    }


def cells_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Medians over the runs of a size and an arm, and the range of its rates."""
    cells = []
    for (active, arm), own in _by_cell(rows).items():
        rates = [row["tok_s"] for row in own]
        phases = [found for row in own if (found := row["phases_ms_per_round"])]
        cells.append(
            {
                "active": active,
                "arm": arm,
                "runs": len(own),
                "tok_s": median(rates),
                "run_range_tok_s": [min(rates), max(rates)],
                **{
                    key: median(row[key] for row in own)
                    for key in ("ms_per_round", "tokens_per_step", "ttft_s")
                },
                "phases_ms_per_round": {
                    name: median(one[name] for one in phases) for name in phases[0]
                }
                if phases
                else None,
            }
        )
    return cells


def ratios_of(rows: Sequence[Row], arm: str, base: str) -> list[dict[str, Any]]:
    """Run i of one arm over run i of another, at each size that both have."""
    found, cells = [], _by_cell(rows)
    for active in sorted({row["active"] for row in rows}):
        ours = {row["run"]: row["tok_s"] for row in cells.get((active, arm), ())}
        theirs = {row["run"]: row["tok_s"] for row in cells.get((active, base), ())}
        paired = [ours[run] / theirs[run] for run in ours if run in theirs]
        if not paired:
            continue
        floor = max(_floor(list(ours.values())), _floor(list(theirs.values())))
        found.append(
            {
                "active": active,
                "arm": arm,
                "baseline": base,
                "ratio": median(paired),
                "run_range": [min(paired), max(paired)],
                "aa_floor": floor if len(paired) > 1 else None,
                "verdict": verdict(paired, floor),
            }
        )
    return found


def verdict(paired: Sequence[float], floor: float) -> str:
    """`ahead` or `behind` where every run says so and the median exceeds what an arm does against
    itself (`floor`, relative); one run alone separates nothing.
    """
    if len(paired) < 2:
        return EVEN
    middle = median(paired)
    if min(paired) > 1 and middle > 1 + floor:
        return AHEAD
    if max(paired) < 1 and 1 / middle > 1 + floor:
        return BEHIND
    return EVEN


def crossover(arm: str, base: str, entries: Sequence[dict[str, Any]]) -> str:
    """One sentence on where `arm` stops being ahead of `base`; entries by size, smallest first.

    Only sizes outside the noise count, and none is concluded beyond those measured.
    """
    if not entries:
        return f"{arm} and {base} were not both measured at any size."
    parts = []
    for word, sizes in _stretches(entries):
        where = word if parts else f"{BEFORE_BASE[word]} {base}"
        parts.append(f"{where} at {', '.join(map(str, sizes))}")
    return f"{arm} is {'; '.join(parts)} active requests: {_meaning(entries)}."


def _stretches(entries: Sequence[dict[str, Any]]) -> list[tuple[str, list[int]]]:
    """Sizes in a row that have one verdict."""
    return [
        (word, [entry["active"] for entry in group])
        for word, group in groupby(entries, key=lambda entry: entry["verdict"])
    ]


def _meaning(entries: Sequence[dict[str, Any]]) -> str:
    sides = _stretches([entry for entry in entries if entry["verdict"] != EVEN])
    largest = entries[-1]["active"]
    if not sides:
        return "no size is outside the noise"
    if len(sides) > 2:
        return "the order changes more than once, so there is no single crossover"
    (first, sizes), (_, last) = sides[0], sides[-1]
    if len(sides) == 2:
        what = "the crossover lies" if first == AHEAD else "it gets ahead"
        return f"{what} between {sizes[-1]} and {last[0]}"
    if first == BEHIND:
        return f"it is ahead at no size up to {largest}"
    if sizes[-1] == largest:
        return f"no crossover up to {largest}"
    return (
        f"no crossover is shown up to {largest}, and {sizes[-1]} is the largest size at which it "
        "is ahead outside the noise"
    )


def _floor(rates: Sequence[float]) -> float:
    """How far an arm's runs are apart, relative."""
    return max(rates) / min(rates) - 1


def _by_cell(rows: Sequence[Row]) -> dict[tuple[int, str], list[Row]]:
    found: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["active"], row["arm"]), []).append(row)
    return found
