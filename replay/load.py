"""Load: several requests in flight, arms one after another.

Closed loop: `concurrency` clients, each with one request in flight, take requests in recorded
order. Open loop: every request is sent at its recorded time after the first, whatever is under
way. Within a run each arm serves all requests alone; the order of arms rotates with the run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from arms.protocol import Arm, ArmResult
from lumotree.errors import LumoTreeError
from replay.rows import Row, RowKey, make_row
from replay.runner import Item, Progress, serve, warm_up

RECORDED = "recorded"
LIMITS = ("ttft", "e2e", "tpot", "burst")
# Slots of an in-process arm under open-loop load, where nothing else says.
DEFAULT_ACTIVE = 8
MOST_CLIENTS = 256


@dataclass(frozen=True)
class LoadPlan:
    """concurrency: clients of a closed loop; arrivals: seconds after the first request, by item,
    of an open loop. One of them is None.
    """

    concurrency: int | None
    arrivals: tuple[float, ...] | None = None

    @property
    def clients(self) -> int:
        return self.concurrency if self.arrivals is None else MOST_CLIENTS


def parse_goodput(text: str) -> dict[str, float]:
    """`ttft=2,burst=0.2` as seconds by limit. Raises LumoTreeError naming the limits."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            seconds = float(value)
        except ValueError:
            seconds = 0.0
        if name not in LIMITS or name in limits or not 0 < seconds < float("inf"):
            raise LumoTreeError(
                f"--goodput has '{part}'; it takes limits in seconds such as ttft=2,burst=0.2",
                f"limits: {', '.join(LIMITS)}",
            )
        limits[name] = seconds
    return limits


def replay_load(
    arms: Sequence[Arm],
    items: Sequence[Item],
    plan: LoadPlan,
    *,
    runs: int,
    warmup: int,
    done: Collection[RowKey],
    append: Callable[[Row], None],
    progress: Progress,
) -> None:
    """Serve all items through each arm in each run, and hand each row over as it ends.

    A row's `details["load"]` says when it was sent. Raises what `append` raises.
    """
    if not arms:
        return
    progress.begin(runs * len(arms) * len(items), len([key for key in done if key[1] > 0]))
    warm_up(arms, items[:warmup], done, append, progress)
    for run in range(1, runs + 1):
        shift = (run - 1) % len(arms)
        for arm in [*arms[shift:], *arms[:shift]]:
            progress.note(f"run {run} of {runs}: {arm.name}")
            arm.new_run()
            serve_all(arm, items, plan, run, append, progress)


def serve_all(
    arm: Arm,
    items: Sequence[Item],
    plan: LoadPlan,
    run: int,
    append: Callable[[Row], None],
    progress: Progress,
) -> None:
    """One arm's run under load."""
    lock, began = threading.Lock(), time.perf_counter()
    failed: list[BaseException] = []
    stop = threading.Event()

    def one(index: int) -> None:
        if stop.is_set():
            return
        due = None if plan.arrivals is None else plan.arrivals[index]
        # A client that waits for its time is told when the run ends without it.
        if due is not None and stop.wait(max(0.0, began + due - time.perf_counter())):
            return
        sent = time.perf_counter() - began
        result = noted(serve(arm, items[index]), sent, due)
        row = make_row(arm.name, run, items[index].request.request_id, result)
        with lock:
            try:
                append(row)
                progress.advance(row)
            except BaseException as error:  # a full disk ends the replay, not only a thread
                failed.append(error)
                stop.set()

    with ThreadPoolExecutor(min(plan.clients, max(len(items), 1))) as clients:
        try:
            list(clients.map(one, range(len(items))))
        except BaseException as error:  # Ctrl-C while waiting
            failed.append(error)
            stop.set()
    if failed:
        raise failed[0]


def noted(result: ArmResult, sent_s: float, due_s: float | None) -> ArmResult:
    """The result with what only load needs to know of it."""
    about: dict[str, Any] = {"sent_s": round(sent_s, 6), "burst_s": list(result.burst_s)}
    if due_s is not None:
        about["late_s"] = round(sent_s - due_s, 6)
    return replace(result, details=result.details | {"load": about})


def summarise_load(
    rows: Sequence[Row],
    arms: Sequence[str],
    concurrency: int | None,
    arrivals: str | None,
    limits: dict[str, float],
) -> dict[str, Any]:
    """`load` of summary.json: throughput, percentiles and goodput by arm."""
    by_arm = {
        name: [row for row in rows if row.arm == name and not row.warmup and "load" in row.details]
        for name in arms
    }
    return {
        "concurrency": concurrency,
        "arrivals": arrivals,
        "limits_s": limits,
        "arms": {name: load_of(own, limits) for name, own in by_arm.items() if own},
    }


def load_of(rows: Sequence[Row], limits: dict[str, float]) -> dict[str, Any]:
    """One arm's figures under load. Failed requests count in none but `failed_requests`."""
    done = [row for row in rows if row.completed]
    wall = sum(_wall_s([row for row in rows if row.run == run]) for run in {r.run for r in rows})
    good = [row for row in done if meets(row, limits)]

    def per_s(count: float) -> float | None:
        return count / wall if wall > 0 else None

    return {
        "requests": len(done),
        "failed_requests": len(rows) - len(done),
        "wall_s": wall,
        "requests_per_s": per_s(len(done)),
        "output_tok_s": per_s(sum(row.completion_tokens for row in done)),
        "goodput_per_s": per_s(len(good)) if limits else None,
        "good_share": len(good) / len(rows) if limits else None,
        "ttft_s": percentiles([row.ttft_s for row in done]),
        "e2e_s": percentiles([row.e2e_s for row in done]),
        "burst_s": percentiles([gap for row in done for gap in row.details["load"]["burst_s"]]),
        "late_s": percentiles(
            [row.details["load"]["late_s"] for row in rows if "late_s" in row.details["load"]]
        ),
    }


def meets(row: Row, limits: dict[str, float]) -> bool:
    """Whether a completed request kept every limit; tpot is decode time per token after the
    first, burst its longest pause between tokens.
    """
    after_first = row.completion_tokens - 1
    figures = {
        "ttft": row.ttft_s,
        "e2e": row.e2e_s,
        "tpot": row.decode_s / after_first if after_first > 0 else 0.0,
        "burst": max(row.details["load"]["burst_s"], default=0.0),
    }
    return all(figures[name] <= limit for name, limit in limits.items())


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """The nearest-rank percentiles; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return {f"p{p}": ordered[max(0, -(-p * len(ordered) // 100) - 1)] for p in (50, 95, 99)}


def _wall_s(rows: Sequence[Row]) -> float:
    """First request sent to last token, of one run."""
    sent = [row.details["load"]["sent_s"] for row in rows]
    return max(s + row.e2e_s for s, row in zip(sent, rows, strict=True)) - min(sent)


def offsets(times: Iterator[float]) -> tuple[float, ...]:
    """Recorded times as seconds after the earliest."""
    known = list(times)
    first = min(known, default=0.0)
    return tuple(at - first for at in known)
