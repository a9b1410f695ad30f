"""Do an arm's counts describe this request, in tokens, and do they add up?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from replay.guards.check import Check, Evidence, at
from replay.rows import Row

# A sequence this long rises strictly by chance once in 720 times.
RISING_ROWS = 6
RISING_FACTOR = 2.0
# Tokens that came with the first event are counted but not timed; above this share it matters.
FIRST_BURST = 0.02


def check_counts(evidence: Evidence) -> Check:
    """Fails counts that contradict the token ids, the cap or the step counts of the same row.

    Chunks counted as tokens and truncated counts fall short of the ids; a count beyond the cap
    cannot be one request's. A step emits its accepted drafts and one token more, so
    completion_tokens - 1 = steps + accepted, less what the end of the request cut off.
    """
    faults: dict[str, list[str]] = {}
    for row in evidence.rows:
        prompt = evidence.prompts.get(row.request_id)
        cap = prompt.max_tokens if prompt is not None else None
        for fault in row_faults(row, cap):
            faults.setdefault(fault, []).append(row.request_id)
    figures = {"outputs": len(evidence.rows), "faults": {k: len(v) for k, v in faults.items()}}
    if not faults:
        return Check("counts", "pass", None, figures)
    reason = "; ".join(
        f"{fault} ({len(where)} of {len(evidence.rows)}: {at(list(dict.fromkeys(where)))})"
        for fault, where in faults.items()
    )
    return Check("counts", "fail", reason, figures)


def row_faults(row: Row, cap: int | None) -> list[str]:
    """What does not add up in one completed row."""
    n, faults = row.completion_tokens, []
    if n < 1:
        faults.append("no completion tokens")
    if row.token_ids is not None:
        # The end-of-text token is counted but is not among the ids.
        allowed = {len(row.token_ids)} | (
            {len(row.token_ids) + 1} if row.finish_reason == "stop" else set()
        )
        if n not in allowed:
            word = "fewer" if n < min(allowed) else "more"
            faults.append(f"{word} completion tokens than token ids")
    if cap is not None and n > cap:
        faults.append("more completion tokens than the cap")
    if cap is not None and row.finish_reason == "length" and n < cap:
        faults.append("stopped by length below the cap: a truncated count or chunks")
    if row.steps is not None and n >= 1:
        faults += _step_faults(row)
    if n > 1 and row.decode_s <= 0:
        faults.append("several tokens without decode time")
    return faults


def _step_faults(row: Row) -> list[str]:
    after_first = row.completion_tokens - 1
    if row.steps > after_first + 1:  # a server may verify once more than it emits
        return ["more steps than tokens"]
    depths = row.accepted_by_depth
    if not depths:
        return []
    if depths[0] > row.steps or any(b > a for a, b in zip(depths, depths[1:], strict=False)):
        return ["accepted drafts exceed steps"]
    emitted = row.steps + sum(depths)
    if emitted < after_first - 1:
        return ["more tokens than steps and accepted drafts give"]
    if emitted > after_first + len(depths) + 1:
        return ["fewer tokens than steps and accepted drafts give: chunks or a truncated count"]
    return []


def check_lifetime(evidence: Evidence) -> Check:
    """Fails counts that only ever rise from request to request: an average since start-up.

    Prompts of a conversation grow too, so prompt tokens are not looked at. The baseline's own
    rising counts (requests that happen to grow) excuse the arm.
    """
    rows = evidence.rows
    counters: dict[str, Callable[[Row], int | None]] = {
        "completion_tokens": lambda row: row.completion_tokens,
        "steps": lambda row: row.steps,
        "accepted drafts": lambda row: sum(row.accepted_by_depth),
    }
    rising = [
        name
        for name, count in counters.items()
        if rises([count(row) for row in rows])
        and not rises([count(row) for row in evidence.baseline])
    ]
    if rising:
        reason = (
            f"{', '.join(rising)} only ever rise over {len(rows)} requests: "
            "lifetime counters, not this request's"
        )
        return Check("lifetime_counters", "fail", reason, {"rising": rising})
    if len(rows) < RISING_ROWS:
        return Check("lifetime_counters", "skip", f"fewer than {RISING_ROWS} requests")
    return Check("lifetime_counters", "pass")


def rises(values: Sequence[int | None]) -> bool:
    """Strictly rising, over enough rows, to at least twice the start."""
    if len(values) < RISING_ROWS or any(value is None for value in values):
        return False
    steady = all(b > a for a, b in zip(values, values[1:], strict=False))
    return steady and values[-1] >= RISING_FACTOR * max(values[0], 1)


def check_resets(evidence: Evidence) -> Check:
    """Server counters that an arm read around each request: their differences must hold.

    `details["counters"]` is {"before": {name: value}, "after": {...}}. `after` below `before` is a
    reset, `before` above the last `after` is somebody else's traffic, and a difference of
    `completion_tokens` that is not the row's is a count of something else.
    """
    faults: dict[str, list[str]] = {}
    last: dict[str, float] = {}
    seen = 0
    for row in evidence.rows:
        read = row.details.get("counters")
        if not isinstance(read, dict):
            continue
        seen += 1
        before, after = read.get("before", {}), read.get("after", {})
        for name in before:
            if name not in after:
                continue
            if after[name] < before[name]:
                faults.setdefault(f"{name} was reset", []).append(row.request_id)
            elif name in last and before[name] < last[name]:
                faults.setdefault(f"{name} was reset between requests", []).append(row.request_id)
            elif name in last and before[name] > last[name]:
                faults.setdefault(f"{name} moved between requests", []).append(row.request_id)
            elif (
                name == "completion_tokens" and after[name] - before[name] != row.completion_tokens
            ):
                faults.setdefault("completion_tokens is not the difference", []).append(
                    row.request_id
                )
            last[name] = after[name]
    if faults:
        reason = "; ".join(f"{fault} ({at(where)})" for fault, where in faults.items())
        return Check("counter_resets", "fail", reason, {k: len(v) for k, v in faults.items()})
    if not seen:
        return Check("counter_resets", "skip", "the arm reads no server counters")
    return Check("counter_resets", "pass", None, {"rows": seen})


def check_first_burst(evidence: Evidence) -> Check:
    """Warns when the first stream event carried many tokens: they are counted but not timed."""
    extra = sum(max(0, row.details.get("first_event_tokens", 1) - 1) for row in evidence.rows)
    total = sum(row.completion_tokens - 1 for row in evidence.rows)
    figures = {"untimed_tokens": extra, "tokens": total}
    if total > 0 and extra > FIRST_BURST * total:
        reason = f"{extra} of {total} tokens came with the first event and are not timed"
        return Check("first_burst", "warn", reason, figures)
    return Check("first_burst", "pass", None, figures)
