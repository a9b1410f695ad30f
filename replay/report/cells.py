"""A table as data: what the page, Markdown and tests share. No markup in here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

NONE = "–"


@dataclass(frozen=True)
class Cell:
    """Text, what to sort by, and how it looks: `num`, `good`, `bad`, `best`, `soft` or nothing.

    `bar` is a share from 0 to 1, drawn as a bar behind the figure.
    """

    text: str
    key: Any = None
    kind: str = ""
    bar: float | None = None
    title: str | None = None


@dataclass(frozen=True)
class Table:
    """Rows under columns. A column is its heading and its unit; `note` says what to know.

    `asides` are sentences that belong under a row, by its index.
    """

    name: str
    title: str
    columns: list[tuple[str, str]]
    rows: list[list[Cell]] = field(default_factory=list)
    note: str | None = None
    asides: dict[int, str] = field(default_factory=dict)

    @property
    def numeric(self) -> list[bool]:
        """Columns that stand right: those whose first cell is a number."""
        if not self.rows:
            return [False] * len(self.columns)
        return ["num" in cell.kind for cell in self.rows[0]]


def number(value: float | None, digits: int = 2, kind: str = "", **more: Any) -> Cell:
    """A figure, or a dash where none was measured."""
    if value is None:
        return Cell(NONE, kind=f"num soft {kind}".strip())
    return Cell(f"{value:,.{digits}f}", value, f"num {kind}".strip(), **more)


def count(value: float | None) -> Cell:
    """A whole number."""
    return number(value, 0)


def words(text: Any, kind: str = "") -> Cell:
    """A cell of words."""
    return Cell(NONE if text is None else str(text), kind=kind)
