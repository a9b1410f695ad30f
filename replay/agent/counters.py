"""Decode rate from a server's own counters: differences between two scrapes around a task.

D = (generated tokens - requests) / (seconds of requests - seconds to their first tokens): each
request's first token belongs to its prefill. The counters are lifetime sums of the server, so a
difference is worth something only when nobody else asked in between: that is checked.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import httpx

from replay.talk import say

TIMEOUT_S = 10.0
SETTLE_S = 2.0
SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{.*\})?\s+([-+0-9.eEnaifNIF]+)(?:\s+\d+)?")
PREFIXES = ("lumotree:", "vllm:", "sglang:")
# Under each field the names it has with one server or another; labels are summed over.
NAMES = {
    "generation_tokens": ("generation_tokens_total",),
    "requests": ("request_success_total", "num_requests_total"),
    "e2e_s": ("e2e_request_latency_seconds_sum",),
    "ttft_s": ("time_to_first_token_seconds_sum",),
}
GAUGES = ("num_requests_running", "num_requests_waiting", "num_running_reqs", "num_queue_reqs")
TOLERANCE_S = 1e-6


@dataclass(frozen=True)
class Counters:
    """One scrape: lifetime sums, and how many requests were under way (None: not told)."""

    generation_tokens: float
    requests: float
    e2e_s: float
    ttft_s: float
    outstanding: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Difference:
    """What lies between two scrapes; seconds and counts."""

    generation_tokens: float
    requests: float
    decode_s: float
    ttft_s: float

    @property
    def tok_s(self) -> float | None:
        """D; None without decode time."""
        tokens = self.generation_tokens - self.requests
        return tokens / self.decode_s if self.decode_s > 0 and tokens > 0 else None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def parse(text: str) -> Counters | None:
    """The counters of a /metrics page; None when one of the four is missing."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        matched = SAMPLE.fullmatch(line.strip()) if not line.startswith("#") else None
        if matched:
            try:
                value = float(matched[2])
            except ValueError:
                continue
            sums[matched[1]] = sums.get(matched[1], 0.0) + value
    for prefix in PREFIXES:
        found = {
            field: next((sums[prefix + name] for name in names if prefix + name in sums), None)
            for field, names in NAMES.items()
        }
        if found["generation_tokens"] is None:
            continue
        # A labelled counter has no sample before its first request.
        found["requests"] = found["requests"] or 0.0
        gauges = [sums[prefix + name] for name in GAUGES if prefix + name in sums]
        if None not in found.values():
            return Counters(**found, outstanding=sum(gauges) if gauges else None)
    return None


def scrape(url: str, key: str | None = None) -> Counters | None:
    """The counters of the server at `url`; None when it exports none, which is said where the
    server wants another key.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        # Certificates take a second to load, and most servers of a study have no need of them.
        secure = url.startswith("https:")
        answer = httpx.get(
            f"{url}/metrics", headers=headers, timeout=TIMEOUT_S, trust_env=False, verify=secure
        )
    except httpx.HTTPError:
        return None
    if answer.status_code in (401, 403):
        _tell_refused(url, answer.status_code)
    return parse(answer.text) if answer.status_code == 200 else None


@cache
def _tell_refused(url: str, status: int) -> None:
    """Once for each server, however often it is asked."""
    say(f"{url}/metrics answered {status}: no counters without the server's key (key=)")


def settled(url: str, key: str | None = None) -> Counters | None:
    """A scrape once no request is under way, which a server is given a moment to reach."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        found = scrape(url, key)
        if found is None or not found.outstanding or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def difference(before: Counters, after: Counters) -> Difference:
    return Difference(
        after.generation_tokens - before.generation_tokens,
        after.requests - before.requests,
        (after.e2e_s - before.e2e_s) - (after.ttft_s - before.ttft_s),
        after.ttft_s - before.ttft_s,
    )


def total(parts: Sequence[Difference]) -> Difference | None:
    """The sum of several tasks' differences; None of none."""
    if not parts:
        return None
    return Difference(
        sum(part.generation_tokens for part in parts),
        sum(part.requests for part in parts),
        sum(part.decode_s for part in parts),
        sum(part.ttft_s for part in parts),
    )


def faults(
    previous: Counters | None,
    before: Counters,
    after: Counters,
    sent: int | None,
    tokens: int | None,
    broke_off: bool = False,
) -> list[str]:
    """Why the difference before/after does not describe the task between them; empty: it does.

    `previous` is the scrape that ended the task before, `sent` and `tokens` what the client
    counted of its own requests (None: it cannot know). `broke_off`: a request did not come to its
    end; servers count its tokens as they come, and its seconds only at the end.
    """
    found = []
    fields = list(NAMES)
    for earlier, later, what in ((previous, before, "before"), (before, after, "during")):
        if earlier is None:
            continue
        fallen = [f for f in fields if getattr(later, f) < getattr(earlier, f) - TOLERANCE_S]
        if fallen:
            found.append(f"counters were reset {what} the task ({', '.join(fallen)})")
    if previous is not None and not found and before.requests > previous.requests:
        count = before.requests - previous.requests
        found.append(f"{count:g} requests of somebody else since the task before")
    for scraped, what in ((before, "beginning"), (after, "end")):
        if scraped.outstanding:
            found.append(f"{scraped.outstanding:g} requests under way at the task's {what}")
    if not found:
        seen = difference(before, after)
        if sent is not None and seen.requests != sent:
            found.append(f"the server counted {seen.requests:g} requests, {sent} were sent")
        elif tokens is not None and abs(seen.generation_tokens - tokens) > 0.5:
            found.append(
                f"the server counted {seen.generation_tokens:g} tokens, its answers said {tokens}"
            )
    if broke_off:
        found.append("a request broke off; its tokens have no time")
    return found
