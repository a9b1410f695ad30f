"""Why an arm is as fast as it is: tok/s = tokens per step / ms per step, and what makes both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lumotree.request import SOURCES
from replay.pooling import Pooled
from replay.rows import Row


def decompose(rows: Sequence[Row], pooled: Pooled, baseline: Pooled | None) -> dict[str, Any]:
    """What a summary says of one arm beyond its rates; formulas in docs/metrics.md.

    accepted_by_source         accepted draft tokens by drafter
    accepted_per_step          the same per step
    reach_by_row               share of steps whose accepted path held row i of the tree
    phase_shares               share of the decode time by phase
    break_even_tokens_per_step tokens per step at which this arm's rate equals the baseline's
    break_even_accepted        the same in accepted drafts per step
    """
    done = [row for row in rows if row.completed and row.steps]
    steps = sum(row.steps for row in done)
    counts = {
        source: sum(row.accepted_by_source.get(source, 0) for row in done)
        for source in SOURCES
        if any(row.accepted_by_source for row in done)
    }
    total_ms = sum(pooled.phases_ms.values())
    level = break_even(pooled, baseline)
    return {
        "accepted_by_source": counts,
        "accepted_per_step": {k: v / steps for k, v in counts.items()} if steps else {},
        "reach_by_row": reach_by_row(done),
        "phase_shares": {k: v / total_ms for k, v in pooled.phases_ms.items()} if total_ms else {},
        "break_even_tokens_per_step": level,
        "break_even_accepted": None if level is None else max(0.0, level - 1),
    }


def break_even(pooled: Pooled, baseline: Pooled | None) -> float | None:
    """Tokens per step that this arm's step must yield to equal the baseline's rate.

    baseline rate (tok/s) * ms per step / 1000: the tokens the baseline makes in one such step.
    """
    if baseline is None or not baseline.pooled_tok_s or not pooled.ms_per_step:
        return None
    return baseline.pooled_tok_s * pooled.ms_per_step / 1000


def reach_by_row(rows: Sequence[Row]) -> list[float]:
    """Share of steps whose accepted path held each row of the tree; empty when none counted.

    Only rows of one tree may be pooled: an arm has one. Row 0 is the root and is always 1.
    """
    counted = [row for row in rows if row.completed and row.steps and row.accepted_by_row]
    steps = sum(row.steps for row in counted)
    width = max((len(row.accepted_by_row) for row in counted), default=0)
    return [
        sum(row.accepted_by_row[i] for row in counted if i < len(row.accepted_by_row)) / steps
        for i in range(width)
    ]
