"""Progress of a study on stderr: a line that moves on a terminal, a line per attempt elsewhere."""

from __future__ import annotations

import sys
import threading
from typing import Any

WIDTH = 79


class Line:
    """Current task, step and rate. Silent when asked to be."""

    def __init__(self, quiet: bool, total: int, done: int = 0) -> None:
        self._quiet, self._total, self._done = quiet, total, done
        self._moving = not quiet and sys.stderr.isatty()
        self._lock = threading.Lock()

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *exc: object) -> None:
        self._clear()

    def note(self, arm: str, task: str, words: str) -> None:
        if self._moving:
            text = f"[{self._done + 1}/{self._total}] {arm} {task}: {words}"
            with self._lock:
                print(f"\r{text[:WIDTH]:<{WIDTH}}", end="", file=sys.stderr, flush=True)

    def finished(self, row: dict[str, Any]) -> None:
        self._done += 1
        reason = f" ({row['reason']})" if row["reason"] else ""
        requests = "" if row["requests"] is None else f"{row['requests']} requests, "
        self.say(
            f"[{self._done}/{self._total}] {row['arm']} {row['task']}: {row['outcome']}{reason}, "
            f"{requests}{row['agent_s'] + row['grading_s']:.0f} s"
        )

    def say(self, words: str) -> None:
        if not self._quiet:
            self._clear()
            with self._lock:
                print(words, file=sys.stderr, flush=True)

    def _clear(self) -> None:
        if self._moving:
            with self._lock:
                print(f"\r{'':<{WIDTH}}\r", end="", file=sys.stderr, flush=True)
