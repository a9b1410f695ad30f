"""Where a record came from: its place in the file, and errors that name it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lumotree.errors import CorpusError


@dataclass(frozen=True)
class Source:
    """One record of a file: a line of JSONL, or the whole file when it is one JSON document."""

    path: Path
    line: int | None = None
    item: str | None = None

    def __str__(self) -> str:
        place = f"{self.path} line {self.line}" if self.line is not None else str(self.path)
        return f"{place}, {self.item}" if self.item else place

    @property
    def stem(self) -> str:
        """A name for what the file holds: `astropy__13977` of `astropy__13977.traj.json`."""
        return self.path.name.split(".")[0] or "corpus"

    def within(self, item: str) -> Source:
        """A part of this record, such as `entry 4`."""
        return Source(self.path, self.line, f"{self.item}, {item}" if self.item else item)

    def error(self, reason: str, hint: str | None = None) -> CorpusError:
        return CorpusError(f"{self}: {reason}", hint)


def need(value: Any, kind: type, what: str, source: Source) -> Any:
    """`value` if it is a `kind`. Raises CorpusError naming the place and the field."""
    if not isinstance(value, kind):
        names = {dict: "an object", list: "a list", str: "a text"}
        raise source.error(f"{what} must be {names.get(kind, kind.__name__)}")
    return value


def messages_of(value: Any, what: str, source: Source) -> list[dict[str, Any]]:
    """A list of chat messages, each an object with a role."""
    messages = need(value, list, what, source)
    if not messages:
        raise source.error(f"{what} is empty")
    for index, message in enumerate(messages):
        need(message, dict, f"{what}[{index}]", source)
        need(message.get("role"), str, f"{what}[{index}].role", source)
    return messages
