"""Placeholder until the map's JSON is known."""

from __future__ import annotations

from typing import Any

from replay.report.view import RunView

TITLE = "Break-even map"
TEXT = ""


def draw(view: RunView) -> Any | None:
    return None
