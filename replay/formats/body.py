"""Bare request bodies, one a line: AIPerf raw payloads, SGLang's `openai` dataset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from replay.formats.source import Source, messages_of

NAME = "body"
TEXT = "bare request bodies"
# Keys of traces that also have messages; such a record is not a bare body.
FOREIGN = ("timestamp", "delay", "session_id", "output_length", "hash_ids", "trajectory_format")


def matches(record: dict[str, Any]) -> bool:
    return "messages" in record and not any(key in record for key in FOREIGN)


def read(record: dict[str, Any], source: Source) -> Iterator[dict[str, Any]]:
    messages_of(record["messages"], "messages", source)
    yield {"body": record}
