"""Rates of one arm from its rows. The formulas are the protocol's; each is stated once, here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lumotree.request import PHASES
from replay.rows import Row


@dataclass(frozen=True)
class Pooled:
    """What an arm's completed rows say. None where nothing was measured.

    pooled_tok_s        sum(n - 1) / sum(e2e - ttft), n the request's completion tokens
    run_range_tok_s     lowest and highest pooled rate of one run
    mean_request_tok_s  mean of (n - 1) / (e2e - ttft) over requests with n > 1
    tokens_per_step     sum(n - 1) / sum(steps): the first token is the prefill's, not a step's
    ms_per_step         1000 * sum(e2e - ttft) / sum(steps)
    survival_by_depth   share of steps whose accepted path reached depth 1, 2, ...
    phases_ms           total milliseconds by phase; phases_ms_per_step divides by sum(steps)
    """

    requests: int
    failed_requests: int
    completion_tokens: int
    pooled_tok_s: float | None
    run_range_tok_s: tuple[float, float] | None
    mean_request_tok_s: float | None
    tokens_per_step: float | None
    ms_per_step: float | None
    survival_by_depth: tuple[float, ...]
    phases_ms: dict[str, float]
    phases_ms_per_step: dict[str, float]


def decode_rate(rows: Sequence[Row]) -> float | None:
    """The pooled decode rate in tokens per second; None without decode time."""
    seconds = sum(row.decode_s for row in rows)
    return sum(row.completion_tokens - 1 for row in rows) / seconds if seconds > 0 else None


def rates_by_run(rows: Sequence[Row]) -> dict[int, float]:
    """The pooled decode rate of each run that has decode time, runs in order."""
    by_run: dict[int, list[Row]] = {}
    for row in rows:
        by_run.setdefault(row.run, []).append(row)
    rates = {run: decode_rate(group) for run, group in sorted(by_run.items())}
    return {run: rate for run, rate in rates.items() if rate is not None}


def request_rate(rows: Sequence[Row]) -> float | None:
    """The mean of each request's own rate in tokens per second, every request equal."""
    rates = [rate for row in rows if row.completion_tokens > 1 and (rate := decode_rate([row]))]
    return sum(rates) / len(rates) if rates else None


def pool(rows: Sequence[Row]) -> Pooled:
    """Pool one arm's rows. Failed rows are counted apart; warm-up rows count nowhere."""
    done = [row for row in rows if row.completed]
    run_rates = rates_by_run(done).values()
    # Only rows that count steps may enter a figure per step.
    stepped = [row for row in done if row.steps is not None]
    steps = sum(row.steps for row in stepped)
    phases = {
        phase: sum(row.phases_ms.get(phase, 0.0) for row in done)
        for phase in PHASES
        if any(row.phases_ms for row in done)
    }
    depth = max((len(row.accepted_by_depth) for row in stepped), default=0)
    reached = [
        sum(row.accepted_by_depth[d] for row in stepped if d < len(row.accepted_by_depth))
        for d in range(depth)
    ]
    return Pooled(
        requests=len(done),
        failed_requests=sum(1 for row in rows if row.error is not None and not row.warmup),
        completion_tokens=sum(row.completion_tokens for row in done),
        pooled_tok_s=decode_rate(done),
        run_range_tok_s=(min(run_rates), max(run_rates)) if run_rates else None,
        mean_request_tok_s=request_rate(done),
        tokens_per_step=sum(r.completion_tokens - 1 for r in stepped) / steps if steps else None,
        ms_per_step=1000 * sum(row.decode_s for row in stepped) / steps if steps else None,
        survival_by_depth=tuple(count / steps for count in reached) if steps else (),
        phases_ms=phases,
        phases_ms_per_step={p: ms / steps for p, ms in phases.items()} if steps else {},
    )
