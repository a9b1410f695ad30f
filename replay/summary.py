"""summary.json: pooled figures, guards and comparisons of a run, computed from its rows alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from replay.guards import Equality
from replay.pooling import decode_rate, pool
from replay.rows import Row

SCHEMA_VERSION = 1
BASELINE = "ar"
RESAMPLES = 2000


def summarise(
    arms: Mapping[str, Mapping[str, Any]], rows: Sequence[Row], equality: Equality | None
) -> dict[str, Any]:
    """The summary of a run. `arms` is run.json's status by arm name, in the order of the run."""
    table: dict[str, dict[str, Any]] = {}
    for name, status in arms.items():
        own = [row for row in rows if row.arm == name]
        entry = asdict(pool(own))
        entry["status"], entry["reason"] = _status(status, entry, own)
        entry["guards"] = equality.of(name) if equality is not None else {}
        table[name] = entry
    rates = {name: entry["pooled_tok_s"] for name, entry in table.items() if entry["pooled_tok_s"]}
    baseline = BASELINE if BASELINE in rates else next(iter(rates), None)
    comparisons = [compare(rows, name, baseline) for name in rates if name != baseline]
    return {
        "schema_version": SCHEMA_VERSION,
        "arms": table,
        "comparisons": [entry for entry in comparisons if entry is not None],
        "fastest": max(rates, key=rates.get) if rates else None,
    }


def compare(rows: Sequence[Row], arm: str, baseline: str) -> dict[str, Any] | None:
    """Ratio of two pooled rates over the requests both completed, None without any.

    The interval is a 95 % bootstrap over requests, all runs of a request drawn together;
    it is left out with fewer than two requests.
    """
    ours = {(row.run, row.request_id): row for row in rows if row.arm == arm and row.completed}
    base = {(row.run, row.request_id): row for row in rows if row.arm == baseline and row.completed}
    shared = [key for key in ours if key in base]
    top = decode_rate([ours[key] for key in shared])
    bottom = decode_rate([base[key] for key in shared])
    if not top or not bottom:
        return None
    result: dict[str, Any] = {"arm": arm, "baseline": baseline, "ratio": top / bottom}
    requests = list(dict.fromkeys(request for _, request in shared))
    if len(requests) > 1:
        result["ci_low"], result["ci_high"] = _bootstrap(ours, base, shared, requests)
    return result


def _bootstrap(
    ours: dict[tuple[int, str], Row],
    base: dict[tuple[int, str], Row],
    shared: list[tuple[int, str]],
    requests: list[str],
) -> tuple[float, float]:
    import numpy as np

    index = {request: i for i, request in enumerate(requests)}
    sums = np.zeros((4, len(requests)))
    for key in shared:
        one, two = ours[key], base[key]
        sums[:, index[key[1]]] += (
            one.completion_tokens - 1,
            one.decode_s,
            two.completion_tokens - 1,
            two.decode_s,
        )
    draws = np.random.default_rng(0).integers(len(requests), size=(RESAMPLES, len(requests)))
    tokens, seconds, base_tokens, base_seconds = (row[draws].sum(axis=1) for row in sums)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = (tokens / seconds) / (base_tokens / base_seconds)
    low, high = np.nanpercentile(ratios, [2.5, 97.5])
    return float(low), float(high)


def _status(
    status: Mapping[str, Any], entry: Mapping[str, Any], rows: Sequence[Row]
) -> tuple[str, str | None]:
    """ok, partial (some requests failed), failed (all did) or unavailable, and the reason."""
    if status["status"] != "ok" and not entry["requests"]:
        return status["status"], status.get("reason")
    failed = entry["failed_requests"]
    if not failed:
        return "ok", None
    first = next(row.error for row in rows if row.error is not None and not row.warmup)
    total = failed + entry["requests"]
    return ("partial" if entry["requests"] else "failed"), f"{failed} of {total} failed: {first}"
