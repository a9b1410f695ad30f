"""What commands say: data on stdout, talk and progress on stderr, a bar only on a terminal."""

from __future__ import annotations

import json
import sys
from typing import Any

from replay.rows import Row


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def say(text: str) -> None:
    """One line of talk on stderr."""
    print(text, file=sys.stderr)


class Bar:
    """Progress of a replay on stderr; silent when that is no terminal or when asked to be."""

    def __init__(self, quiet: bool = False) -> None:
        self._progress = None
        self._task = None
        if quiet or not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=None)

    def __enter__(self) -> Bar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def begin(self, total: int, done: int) -> None:
        if self._progress is not None:
            self._progress.update(self._task, total=total, completed=done)

    def note(self, text: str) -> None:
        if self._progress is not None:
            self._progress.update(self._task, description=text)

    def advance(self, row: Row) -> None:
        if self._progress is not None:
            self._progress.update(self._task, advance=1)
