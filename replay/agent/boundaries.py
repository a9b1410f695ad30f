"""Scrapes of a server's counters at the boundaries of tasks, and what a task made of them."""

from __future__ import annotations

import threading
from typing import Any

from replay.agent import counters
from replay.agent.attempt import STEPS, SUBMITTED, Attempt
from replay.agent.servers import ServedArm


class Boundaries:
    """Scrapes around tasks, or around the whole arm when tasks run beside one another."""

    def __init__(self, arm: ServedArm, known: dict[str, Any], parallel: int) -> None:
        self._arm, self._known, self._parallel = arm, known, parallel
        self._previous: counters.Counters | None = None
        self._begin: counters.Counters | None = None
        self._lock = threading.Lock()
        self._sent: int | None = 0
        self._tokens: int | None = 0
        self._broke_off = False

    def __enter__(self) -> Boundaries:
        self._begin = self._previous = counters.scrape(self._arm.url, self._arm.key)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._parallel == 1 or self._begin is None:
            return
        end = counters.settled(self._arm.url, self._arm.key)
        if end is not None:
            # One entry per start of the server: a resumed study has several.
            part = _compare(None, self._begin, end, self._sent, self._tokens, self._broke_off)
            self._known.setdefault("segments", []).append(part)

    def before(self) -> counters.Counters | None:
        return counters.scrape(self._arm.url, self._arm.key) if self._parallel == 1 else None

    def after(self, before: counters.Counters | None, made: Attempt) -> dict[str, Any] | None:
        """The differences of one task and what is wrong with them; None without counters."""
        sent = len(made.exchanges) or None
        tokens = made.completion_tokens if made.exchanges else None
        if made.exit_status not in (SUBMITTED, STEPS):
            # A request that broke off is counted by some servers and not by others.
            sent = tokens = None
        with self._lock:
            self._sent = None if None in (sent, self._sent) else self._sent + sent
            self._tokens = None if None in (tokens, self._tokens) else self._tokens + tokens
            self._broke_off |= made.broke_off
        if before is None:
            return None
        after = counters.settled(self._arm.url, self._arm.key)
        if after is None:
            return None
        seen = _compare(self._previous, before, after, sent, tokens, made.broke_off)
        self._previous = after
        return seen


def _compare(
    previous: counters.Counters | None,
    before: counters.Counters,
    after: counters.Counters,
    sent: int | None,
    tokens: int | None,
    broke_off: bool,
) -> dict[str, Any]:
    found = counters.difference(before, after)
    return {
        "before": before.as_dict(),
        "after": after.as_dict(),
        "difference": found.as_dict(),
        "tok_s": found.tok_s,
        "faults": counters.faults(previous, before, after, sent, tokens, broke_off),
    }
