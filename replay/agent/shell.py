"""A command's result as the agent sees it, and the surroundings that make it repeatable."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Protocol

OUTPUT_CAP = 4000
STAMP = "2026-01-01T00:00:00+00:00"
# Test runners end with "in 0.12s": the one thing in their output that is never twice the same.
DURATION = re.compile(r" in \d+\.\d+s(?: \(\d+:\d\d:\d\d\))?(?!\w)")


@dataclass(frozen=True)
class Result:
    """A command's exit code and its output, stdout and stderr in one, normalised and capped.

    `fault` says why the command was ended or what it left behind, None for an ordinary end.
    """

    exit_code: int
    output: str
    fault: str | None = None


class Shell(Protocol):
    """What the loop runs commands in: each one a fresh shell at the root of the workspace."""

    def run(self, command: str) -> Result: ...


# Nothing of the caller's own environment reaches a command; PATH and HOME are added by the shell.
STABLE = {
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "COLUMNS": "80",
    "NO_COLOR": "1",
    "PAGER": "cat",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONNOUSERSITE": "1",
    "PYTEST_ADDOPTS": "-p no:cacheprovider",
    # Hypothesis draws the same examples every time, and knows no deadline, where CI is set.
    "CI": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "core.abbrev",
    "GIT_CONFIG_VALUE_0": "7",
    "GIT_AUTHOR_NAME": "developer",
    "GIT_AUTHOR_EMAIL": "developer@example.com",
    "GIT_AUTHOR_DATE": STAMP,
    "GIT_COMMITTER_NAME": "developer",
    "GIT_COMMITTER_EMAIL": "developer@example.com",
    "GIT_COMMITTER_DATE": STAMP,
}


def without_durations(output: str) -> str:
    """The output less the seconds a test run took."""
    return DURATION.sub("", output)


def cap(output: str, limit: int = OUTPUT_CAP) -> str:
    """Cuts the middle out of long output, as agents do, and says how much is gone."""
    if len(output) <= limit:
        return output
    head, tail = output[: limit // 2], output[-(limit - limit // 2) :]
    return f"{head}\n[{len(output) - limit} characters left out]\n{tail}"
